"""Tasks, by name: `arithmetic`, `gsm8k:path=gsm8k_{split}.jsonl,shots=8`, `prompts:path=file.jsonl`."""

from reprieve.tasks.base import TASKS, Task, TaskProblem, register_task
from reprieve.tasks.graders import GRADERS, Grader, register_grader


def load_task(spec: str) -> Task:
    """The task a text names, with its settings.

    Raises:
        SpecError: an unknown name or setting; the message lists the known ones.
    """
    return TASKS.make(spec)


__all__ = [
    "GRADERS",
    "TASKS",
    "Grader",
    "Task",
    "TaskProblem",
    "load_task",
    "register_grader",
    "register_task",
]
