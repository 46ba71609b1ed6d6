"""Tasks, by name: `arithmetic`, `gsm8k:path=gsm8k_{split}.jsonl,shots=8`, `prompts:path=file.jsonl`."""

from reprieve.errors import SpecError
from reprieve.tasks.base import TASKS, Task, TaskProblem, register_task
from reprieve.tasks.graders import GRADERS, Grader, register_grader


def load_task(spec: str) -> Task:
    """The task a text names, with its settings.

    Raises:
        SpecError: an unknown name or setting; the message lists the known ones. Or a class that is no `Task`.
    """
    task = TASKS.make(spec)
    if Task not in type(task).__mro__:
        raise SpecError(f"task {spec!r}: its class {type(task).__name__} must derive from reprieve.tasks.Task")
    return task


__all__ = ["GRADERS", "TASKS", "Grader", "Task", "TaskProblem", "load_task", "register_grader", "register_task"]
