"""Tasks, by name."""

from collections.abc import Callable

from reprieve.errors import require_choice
from reprieve.tasks.arithmetic import ArithmeticTask
from reprieve.tasks.base import Task, TaskProblem

TASKS: dict[str, Callable[[], Task]] = {"arithmetic": ArithmeticTask}


def load_task(name: str) -> Task:
    """The task of that name.

    Raises:
        SpecError: an unknown name; the message lists the known ones.
    """
    require_choice("task", name, tuple(TASKS))
    return TASKS[name]()


__all__ = ["TASKS", "Task", "TaskProblem", "load_task"]
