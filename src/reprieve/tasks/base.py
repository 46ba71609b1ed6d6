"""A task: problems, how to ask them, and whether an answer is right. Shared by labelling and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reprieve.registry import Registry
from reprieve.tasks.graders import Grader


@dataclass(frozen=True)
class TaskProblem:
    """One problem: the exact prompt, the reference answer graders compare with, and what is said after the answer."""

    problem_id: str
    prompt: str
    reference: str
    follow_ups: tuple[str, ...] = ()  # the user's later turns
    category: str = ""


class Task(Protocol):
    """What evaluation and labelling need to know of a task."""

    name: str
    graded: bool  # whether answers can be compared; else only a judge tells responses apart
    splits: tuple[str, ...]
    stop: tuple[str, ...]
    grader: Grader

    @property
    def max_new_tokens(self) -> int:
        """Budget of an answer."""
        ...

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        """Problems `offset` to `offset + limit` of a split; always the same ones, whatever the run's seed."""
        ...

    def wrap(self, question: str) -> str:
        """A bare question as this task asks it."""
        ...

    def extract_answer(self, text: str) -> str | None:
        """The final answer in a response, or None where it gives none."""
        return self.grader.extract(text)

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        """Whether two extracted answers are the same; an absent answer equals nothing."""
        return self.grader.equivalent(answer, other)

    def same(self, problem: TaskProblem, answer: str | None, other: str | None) -> bool:
        """Whether two answers to a problem are as good as each other, right or wrong; mining asks it."""
        return self.equivalent(answer, other)


TASKS: Registry[Task] = Registry("task", "reprieve.tasks")
register_task = TASKS.register
