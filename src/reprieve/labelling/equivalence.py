"""When a changed response is as good as the one it replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reprieve.labelling.responses import ResponseFormat
from reprieve.tasks import Task, TaskProblem


@dataclass(frozen=True)
class Comparison:
    """Whether the changed token matters; None where it could not be told, and why."""

    important: bool | None
    reason: str = ""
    votes: str = ""


class Equivalence(Protocol):
    """Decides whether a changed response is equivalent."""

    def usable(self, reference: str | None) -> bool:
        """Whether the target's own answer can be compared with."""
        ...

    async def compare(
        self,
        problem: TaskProblem,
        responses: ResponseFormat,
        original: list[int],  # the target's own response
        running: list[int],  # with the swaps accepted so far
        changed: list[int],  # with one more
    ) -> Comparison:
        """Judge one swap."""
        ...


@dataclass(frozen=True)
class SameAnswer:
    """Equivalent when the extracted answers are (AutoJudge, Algorithm 1, line 12).

    The reference is the target's own answer, right or wrong. A changed response without an answer is not equivalent.
    """

    task: Task

    def usable(self, reference: str | None) -> bool:
        return reference is not None

    async def compare(
        self,
        problem: TaskProblem,
        responses: ResponseFormat,
        original: list[int],
        running: list[int],
        changed: list[int],
    ) -> Comparison:
        same = self.task.equivalent(responses.answer(changed), responses.answer(original))
        return Comparison(important=not same)
