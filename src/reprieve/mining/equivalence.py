"""Equivalence of a changed response and the one it replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reprieve.mining.responses import ResponseFormat
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.chat import FIRST_BETTER, SECOND_BETTER, Chat, ask_verdict


@dataclass(frozen=True)
class Comparison:
    """Importance of the changed token; None if undecided, with the reason."""

    important: bool | None
    reason: str = ""
    votes: str = ""


class Equivalence(Protocol):
    """Decides whether a changed response is equivalent."""

    def usable(self, reference: str | None) -> bool:
        """Return True if the target's own answer can serve as the reference."""
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
    """Equivalence of extracted answers (AutoJudge, Algorithm 1, line 12).

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
        same = await responses.grade(self.task.same, problem, responses.answer(changed), responses.answer(original))
        return Comparison(important=not same)


@dataclass(frozen=True)
class NotWorse:
    """Equivalence for open-ended tasks: a language model does not find the changed response worse (appendix L).

    The changed response is compared with the running one, including the swaps accepted so far, not with the original.

    Args:
        chat: the judge.
        num_votes: number of votes; a token is important if more votes find the response worse than better. Ties do not
            count.
        num_tries: maximum number of requests per vote; the vote is dropped if no reply can be parsed.
    """

    chat: Chat
    num_votes: int = 3
    num_tries: int = 3

    def usable(self, reference: str | None) -> bool:
        return bool(reference)

    async def compare(
        self,
        problem: TaskProblem,
        responses: ResponseFormat,
        original: list[int],
        running: list[int],
        changed: list[int],
    ) -> Comparison:
        texts = (problem.question_text, responses.text(running), responses.text(changed))
        votes = [
            await ask_verdict(self.chat, *texts, number=number, num_tries=self.num_tries)
            for number in range(self.num_votes)
        ]
        votes_cast = ",".join(vote or "none" for vote in votes)
        if not any(votes):
            return Comparison(None, "the judge gave no verdict", votes_cast)
        worse = sum(vote in FIRST_BETTER for vote in votes)
        better = sum(vote in SECOND_BETTER for vote in votes)
        return Comparison(worse > better, votes=votes_cast)
