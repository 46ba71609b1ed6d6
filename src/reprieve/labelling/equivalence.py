"""When a changed response is as good as the one it replaces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from reprieve.labelling.chat import Chat
from reprieve.labelling.responses import ResponseFormat
from reprieve.tasks import Task, TaskProblem


@dataclass(frozen=True)
class Comparison:
    """Whether the changed token matters; None where it could not be decided, and why."""

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
        same = await responses.grade(self.task.same, problem, responses.answer(changed), responses.answer(original))
        return Comparison(important=not same)


_VERDICT = re.compile(r"\[\[(A>>B|A>B|A=B|B>A|B>>A)\]\]")
_PROMPT = """\
Two assistants, A and B, answered the same request. Compare their answers: correctness first, then how well they do
what was asked, then clarity. Ignore which came first, and do not prefer the longer one for its length.

Request:
{question}

Answer of assistant A:
{running}

Answer of assistant B:
{changed}

Explain in a sentence or two, then end with exactly one of these verdicts:
[[A>>B]] A is much better   [[A>B]] A is slightly better   [[A=B]] about the same
[[B>A]] B is slightly better   [[B>>A]] B is much better"""

FIRST_BETTER, SECOND_BETTER = ("A>>B", "A>B"), ("B>>A", "B>A")


async def ask_verdict(
    chat: Chat, question: str, first: str, second: str, *, number: int = 0, num_tries: int = 3
) -> str | None:
    """One vote on two answers, `A>>B` to `B>>A`; None where no reply holds a verdict.

    Args:
        number: of the vote; another one may turn out otherwise.
        num_tries: how often a reply without a verdict is asked for again.
    """
    prompt = _PROMPT.format(question=question, running=first, changed=second)
    for attempt in range(num_tries):
        replies = _VERDICT.findall(await chat.ask(prompt, attempt=number * num_tries + attempt))
        if replies:
            return str(replies[-1])
    return None


@dataclass(frozen=True)
class NotWorse:
    """For open-ended tasks: unimportant unless a language model finds the changed response worse (appendix L).

    The changed response is compared with the running one, swaps accepted so far included, not with the original.

    Args:
        chat: the judge.
        num_votes: replies that are counted; important where more find it worse than better, ties left out.
        num_tries: how often a reply without a verdict is asked for again before that vote is lost.
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
        texts = (problem.asked, responses.text(running), responses.text(changed))
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
