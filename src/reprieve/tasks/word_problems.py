"""The bundled tasks: generated grade-school word problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from reprieve.errors import require_choice
from reprieve.tasks.base import Task, TaskProblem, register_task
from reprieve.tasks.generated.problems import ARITHMETIC, MINIATURE, SPLITS, Contents, GeneratedProblem, draw_problem
from reprieve.tasks.graders import Grader, NumberGrader


@register_task
@dataclass
class ArithmeticTask(Task):
    """Word problems of 2 to 6 steps; the answer is the number after "The final answer is"."""

    contents: ClassVar[Contents] = ARITHMETIC

    name: str = field(default="arithmetic", init=False)
    graded: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=SPLITS, init=False)
    max_new_tokens: int = field(default=256, init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, SPLITS)
        drawn = (draw_problem(split, index, contents=self.contents) for index in range(offset, offset + limit))
        return [as_task_problem(problem) for problem in drawn]

    def wrap(self, question: str) -> str:
        return question if question.startswith("Question:") else f"Question: {question.strip()}\nAnswer:"


@register_task
@dataclass
class WordProblemsTask(ArithmeticTask):
    """The miniature's: 1 to 8 steps, more percentages of large numbers."""

    contents: ClassVar[Contents] = MINIATURE

    name: str = field(default="word_problems", init=False)
    max_new_tokens: int = field(default=300, init=False)


def as_task_problem(problem: GeneratedProblem) -> TaskProblem:
    """Convert a generated problem to a `TaskProblem`."""
    return TaskProblem(problem.problem_id, problem.prompt, str(problem.answer), question=problem.question)
