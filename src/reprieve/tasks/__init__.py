"""Tasks, by name: `arithmetic`, `gsm8k:path=gsm8k_{split}.jsonl,shots=8`, `prompts:path=file.jsonl`."""

from reprieve.errors import require_choice
from reprieve.rules.spec import convert_parameters, parse_parameters
from reprieve.tasks.arithmetic import ArithmeticTask
from reprieve.tasks.base import Task, TaskProblem
from reprieve.tasks.gsm8k import Gsm8kTask
from reprieve.tasks.programs import HumanEvalTask, LiveCodeBenchTask
from reprieve.tasks.prompts import PromptsTask

TASKS: dict[str, type] = {
    "arithmetic": ArithmeticTask,
    "gsm8k": Gsm8kTask,
    "prompts": PromptsTask,
    "humaneval": HumanEvalTask,
    "livecodebench": LiveCodeBenchTask,
}


def load_task(spec: str) -> Task:
    """The task a text names, with its settings.

    Raises:
        SpecError: an unknown name or setting; the message lists the known ones.
    """
    name, _, rest = spec.partition(":")
    require_choice("task", name, tuple(TASKS))
    given = parse_parameters(rest, where=f"task {name}")
    task: Task = TASKS[name](**convert_parameters(TASKS[name], given, where=f"task {name}"))
    return task


__all__ = ["TASKS", "Task", "TaskProblem", "load_task"]
