"""AutoJudge's search for important tokens (Algorithm 1), its naive variant, and a judge model's verdict on answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reprieve.concurrency import gather_all
from reprieve.mining.draft import Draft
from reprieve.mining.settings import AutoJudgeMining
from reprieve.mining.store import MINED, NO_ANSWER, Mismatch, ProblemLabels
from reprieve.mining.target import ResponseFormat, ResponseSampler, Target, TokenizationError
from reprieve.models.sampling import GumbelNoise
from reprieve.tasks import TaskProblem, run_comparison
from reprieve.tasks.chat import FIRST_BETTER, SECOND_BETTER, Chat, ask_verdict

_NUM_VOTES = 3


@dataclass(frozen=True)
class AutoJudgeMiner:
    """Finds the mismatches that change the answer.

    The variant `search` is Algorithm 1: swaps that leave the answer equivalent are kept, and the search continues from
    the new response, so tokens are judged jointly. If the draft's own answer differs from the target's, it finds at
    least one important token. The variant `naive` (appendix A) tries each mismatch of the target's response in
    isolation and misses tokens that are harmful only in combination.

    Answers are compared with the target's own, right or wrong (line 12). A changed response without an answer is not
    equivalent.

    Args:
        target: continues texts.
        make_draft: makes a draft reader for one problem from its repeatable noise for sampling, which both models
            share; None when greedy.
        judge: language model that compares open-ended responses instead (`judged_worse`).
    """

    settings: AutoJudgeMining
    target: Target
    make_draft: Callable[[GumbelNoise | None], Draft]
    responses: ResponseFormat
    judge: Chat | None = None

    async def mine(self, problem: TaskProblem) -> ProblemLabels:
        """Label one problem's mismatches."""
        search = _Search(self, problem)
        original = await search.complete([])
        reference = self.responses.answer(original)
        running, status = original, NO_ANSWER
        mismatches: list[Mismatch] = []
        if reference or (reference is not None and self.judge is None):  # a judge cannot compare with an empty text
            status = MINED
            if self.settings.variant == "search":
                running, mismatches = await search.jointly(original, reference)
            else:
                mismatches = await search.each_alone(original, reference)
        return ProblemLabels(
            problem_id=problem.problem_id,
            status=status,
            prompt_ids=tuple(search.texts.prompt_ids),
            target_ids=tuple(original),
            response_ids=tuple(running),
            target_answer=reference,
            mismatches=tuple(mismatches),
            num_generated=search.texts.num_generated,
            source=f"autojudge-{self.settings.variant}",
        )


class _Search:
    """State of one problem's search; target and draft read common prefixes only once."""

    def __init__(self, miner: AutoJudgeMiner, problem: TaskProblem) -> None:
        self.miner = miner
        self.problem = problem
        settings = miner.settings
        self.noise = None if settings.sampling.greedy else GumbelNoise(settings.problem_seed(problem.problem_id))
        self.draft = miner.make_draft(self.noise)
        self.texts = ResponseSampler(miner.target, miner.responses, problem)

    async def complete(self, response_ids: list[int]) -> list[int]:
        """Return the completed response, unchanged if it has ended."""
        return (await self.texts.complete(response_ids, [self.noise]))[0]

    async def jointly(self, original: list[int], reference: str) -> tuple[list[int], list[Mismatch]]:
        """Run Algorithm 1, lines 6 to 20; return the response after all harmless swaps, and the mismatches."""
        running, start = original, 0
        tried: list[Mismatch] = []
        while True:
            async for position, draft_id in self.draft.mismatches(self.texts.prompt_ids, running, start):
                mismatch, response = await self.attempt(running, draft_id, position, reference)
                tried.append(mismatch)
                if mismatch.important is False:
                    running, start = response, position + 1
                    break
            else:  # no swap was harmless
                return running, tried

    async def each_alone(self, original: list[int], reference: str) -> list[Mismatch]:
        """Try every mismatch of the target's response, each alone."""
        found = [mismatch async for mismatch in self.draft.mismatches(self.texts.prompt_ids, original)]
        attempts = [self.attempt(original, draft_id, position, reference) for position, draft_id in found]
        return [mismatch for mismatch, _ in await gather_all(attempts)]

    async def attempt(
        self, running: list[int], draft_id: int, position: int, reference: str
    ) -> tuple[Mismatch, list[int]]:
        """Swap in the draft's token at a position, let the target continue, and compare."""
        try:
            response = await self.complete([*running[:position], draft_id])
        except TokenizationError as error:
            return Mismatch(position, running[position], draft_id, None, reason=str(error)), running
        responses = self.miner.responses
        answer, reason, votes = responses.answer(response), "", ""
        important: bool | None
        if self.miner.judge is None:
            important = not await run_comparison(responses.task, responses.task.same, self.problem, answer, reference)
        else:
            # The running response, with the swaps accepted so far, is the one to compare with.
            texts = responses.text(running), responses.text(response)
            important, votes = await judged_worse(self.miner.judge, self.problem.question_text, *texts)
            reason = "the judge gave no verdict" if important is None else ""
        mismatch = Mismatch(
            position,
            running[position],
            draft_id,
            important,
            reason=reason,
            continuation_ids=tuple(response[position + 1 :]),
            answer=answer,
            verdict=votes,
        )
        return mismatch, response


async def judged_worse(chat: Chat, question: str, running: str, changed: str) -> tuple[bool | None, str]:
    """Return whether a language model finds the changed response worse than the running one (appendix L).

    Ties do not count: it is worse if more of three votes find it worse than better.

    Returns:
        None if no vote could be parsed; and the votes.
    """
    votes = [await ask_verdict(chat, question, running, changed, number=number) for number in range(_NUM_VOTES)]
    votes_cast = ",".join(vote or "none" for vote in votes)
    if not any(votes):
        return None, votes_cast
    worse = sum(vote in FIRST_BETTER for vote in votes)
    better = sum(vote in SECOND_BETTER for vote in votes)
    return worse > better, votes_cast
