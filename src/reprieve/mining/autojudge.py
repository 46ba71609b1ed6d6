"""AutoJudge's search for important tokens (Algorithm 1), its naive variant, and sampling through Gumbel noise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from reprieve.errors import ReprieveError, require_choice
from reprieve.mining.draft import Draft
from reprieve.mining.equivalence import Equivalence
from reprieve.mining.records import MINED, NO_ANSWER, Mismatch, ProblemLabels
from reprieve.mining.responses import ResponseFormat
from reprieve.mining.target import Target, gather_all
from reprieve.models.batch_decoder import Session
from reprieve.models.sampling import Draw, GumbelNoise
from reprieve.tasks import TaskProblem

VARIANTS = ("search", "naive")


@dataclass
class AutoJudgeMiner:
    """Finds the mismatches that change the answer.

    `variant="search"` is Algorithm 1: swaps that leave the answer equivalent are kept, and the search continues from
    the new response, so tokens are judged jointly. If the draft's own answer differs from the target's, it finds at
    least one important token. `variant="naive"` (appendix A) tries each mismatch of the target's response in isolation
    and misses tokens that are harmful only in combination.

    Args:
        target: continues texts.
        make_draft: makes a draft reader for one problem.
        responses: format of responses.
        equivalence: compares responses.
        noise: returns a problem's repeatable noise for sampling, shared by both models; None when greedy.
    """

    target: Target
    make_draft: Callable[[GumbelNoise | None], Draft]
    responses: ResponseFormat
    equivalence: Equivalence
    noise: Callable[[TaskProblem], GumbelNoise] | None = None
    variant: str = "search"

    def __post_init__(self) -> None:
        require_choice("variant", self.variant, VARIANTS)

    async def mine(self, problem: TaskProblem) -> ProblemLabels:
        """Label one problem's mismatches."""
        search = _Search(self, problem)
        started = time.perf_counter()
        original = await search.complete([])
        if original is None:
            name = problem.problem_id
            raise ReprieveError(f"the target's response to {name} cannot be represented in the draft's tokens")
        reference = self.responses.answer(original)
        usable = self.equivalence.usable(reference)
        running = original
        mismatches: list[Mismatch] = []
        if usable and self.variant == "search":
            running, mismatches = await self._search(search, original)
        elif usable:
            mismatches = await self._try_each(search, original)
        return ProblemLabels(
            problem_id=problem.problem_id,
            status=MINED if usable else NO_ANSWER,
            prompt_ids=tuple(search.prompt_ids),
            target_ids=tuple(original),
            response_ids=tuple(running),
            target_answer=reference,
            mismatches=tuple(mismatches),
            seconds=time.perf_counter() - started,
            num_generated=search.num_generated,
            source=f"autojudge-{self.variant}",
        )

    async def _search(self, search: _Search, original: list[int]) -> tuple[list[int], list[Mismatch]]:
        """Run Algorithm 1, lines 6 to 20; return the response after all harmless swaps, and the mismatches."""
        running = original
        mismatches: list[Mismatch] = []
        start: int | None = 0
        while start is not None:
            running, start = await self._next_swap(search, running, start, original, mismatches)
        return running, mismatches

    async def _next_swap(
        self, search: _Search, running: list[int], start: int, original: list[int], mismatches: list[Mismatch]
    ) -> tuple[list[int], int | None]:
        """Try mismatches up to the first harmless one.

        Returns:
            The response after that swap and the position to resume from; the position is None if no swap was harmless.
        """
        async for position, draft_id in search.draft.mismatches(search.prompt_ids, running, start):
            mismatch, response = await search.attempt(running, draft_id, position, original)
            mismatches.append(mismatch)
            if mismatch.important is False:
                assert response is not None
                return response, position + 1
        return running, None

    async def _try_each(self, search: _Search, original: list[int]) -> list[Mismatch]:
        """Try every mismatch of the target's response, each alone."""
        found = [mismatch async for mismatch in search.draft.mismatches(search.prompt_ids, original)]
        attempts = [search.attempt(original, draft_id, position, original) for position, draft_id in found]
        return [mismatch for mismatch, _ in await gather_all(attempts)]


class _Search:
    """State of one problem's search; target and draft read common prefixes only once."""

    def __init__(self, miner: AutoJudgeMiner, problem: TaskProblem) -> None:
        self.miner = miner
        self.problem = problem
        self.prompt_ids = miner.responses.encode_prompt(problem)
        noise = miner.noise(problem) if miner.noise else None
        self.draw: Draw | None = noise
        self.draft = miner.make_draft(noise)
        self.session = Session()
        self.num_generated = 0

    async def complete(self, response_ids: list[int]) -> list[int] | None:
        """Return the completed response, unchanged if it has ended; None if the target cannot continue it."""
        num_left = self.miner.responses.num_left(response_ids)
        if num_left < 1:
            return response_ids
        new = await self.miner.target.complete(self.session, self.prompt_ids, response_ids, num_left, self.draw)
        if new is None:
            return None
        self.num_generated += len(new)
        return [*response_ids, *new]

    async def attempt(
        self, running: list[int], draft_id: int, position: int, original: list[int]
    ) -> tuple[Mismatch, list[int] | None]:
        """Swap in the draft's token at a position, let the target continue, and compare."""
        response = await self.complete([*running[:position], draft_id])
        if response is None:
            reason = "the target would tokenize the swapped text differently"
            return Mismatch(position, running[position], draft_id, None, reason), None
        equivalence, answers = self.miner.equivalence, self.miner.responses
        verdict = await equivalence.compare(self.problem, answers, original, running, response)
        mismatch = Mismatch(
            position,
            running[position],
            draft_id,
            verdict.important,
            reason=verdict.reason,
            continuation_ids=tuple(response[position + 1 :]),
            answer=answers.answer(response),
            verdict=verdict.votes,
        )
        return mismatch, response
