"""PAD's label collection (its Algorithm 1): rollouts on both sides of every token that speculative sampling rejects."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from reprieve.errors import SpecError, require_range, require_whole
from reprieve.mining.records import MINED, Mismatch, ProblemLabels
from reprieve.mining.responses import ResponseFormat
from reprieve.mining.soundness import NOT_ASKED, UNSOUND, SoundnessJudge
from reprieve.mining.target import Target, gather_all
from reprieve.models.batch_decoder import Session
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import Draw, Sampler, UniformDraw
from reprieve.rules.lossless import residual_probs, sampling_accepts
from reprieve.settings import SamplingParams
from reprieve.tasks import TaskProblem


@dataclass(frozen=True)
class Candidate:
    """Drafted token that speculative sampling rejected."""

    draft_id: int
    fallback_id: int  # drawn from the residual instead


class CandidateSource:
    """Walks one problem's response by speculative sampling and stops at every rejected token.

    Args:
        target, draft: models with their own caches.
        block_size: drafted tokens per verification. Affects speed, and changes the random draws.
    """

    def __init__(self, target: CachedModel, draft: CachedModel, params: SamplingParams, *, block_size: int = 8) -> None:
        self.target = target
        self.draft = draft
        self.sampler = Sampler(params, target.device)
        self.block_size = block_size

    @torch.inference_mode()
    def next(self, prompt_ids: list[int], response_ids: list[int], num_left: int) -> tuple[list[int], Candidate | None]:
        """Return the next accepted tokens of the response, and the rejected token that ended them, if any."""
        text = [*prompt_ids, *response_ids]
        drafted, draft_logits = self._draft(text, min(self.block_size, num_left))
        self.target.start(text[:-1], reuse_prefix=True)
        logits, _ = self.target.forward([text[-1], *drafted[:-1]])
        token_ids = torch.tensor(drafted, device=self.target.device)
        target_probs = self.sampler.target_scores(logits).softmax(-1)
        proposal = self.sampler.draft_scores(draft_logits).softmax(-1)
        accepts = sampling_accepts(target_probs, proposal, token_ids, self.sampler.uniforms(len(drafted))).tolist()
        rejected = next((i for i, accepted in enumerate(accepts) if not accepted), None)
        if rejected is None:
            return drafted, None
        residual = residual_probs(target_probs[rejected], proposal[rejected], token_ids[rejected])
        return drafted[:rejected], Candidate(drafted[rejected], int(self.sampler.draw(residual[None])))

    def _draft(self, text: list[int], size: int) -> tuple[list[int], torch.Tensor]:
        """Return drafted tokens and the logits [size, V] that each was drawn from."""
        self.draft.start(text[:-1], reuse_prefix=True)
        drafted: list[int] = []
        rows = []
        for _ in range(size):
            logits, _ = self.draft.forward([drafted[-1] if drafted else text[-1]])
            rows.append(logits[-1].to(self.target.device))
            drafted.append(int(self.sampler.draft_token(rows[-1][None])))
        return drafted, torch.stack(rows)


@dataclass
class PivotMiner:
    """Labels a rejected token as a pivot if fewer rollouts that include it reach the right answer.

    Args:
        target: continues texts, for rollouts.
        make_source: makes a problem's `CandidateSource` from its seed.
        responses: format of responses.
        make_seed: returns a problem's own seed.
        num_rollouts: N, on each side, 1 or more.
        alpha: a token is a pivot if its utility is below alpha times the base utility, 0 to 1. Larger values find more
            pivots.
        soundness: judges the median-length correct rollout of a non-pivot and can turn it into a pivot.
    """

    target: Target
    make_source: Callable[[int], CandidateSource]
    responses: ResponseFormat
    make_seed: Callable[[TaskProblem], int]
    num_rollouts: int = 8
    alpha: float = 0.8
    soundness: SoundnessJudge | None = None

    def __post_init__(self) -> None:
        require_whole("num_rollouts", self.num_rollouts, 1)
        require_range("alpha", self.alpha, 0.0, 1.0)

    async def mine(self, problem: TaskProblem) -> ProblemLabels:
        """Walk through one response, labelling every rejected token."""
        started = time.perf_counter()
        walk = _Walk(self, problem)
        while (num_left := self.responses.num_left(walk.response_ids)) > 0:
            go_on = functools.partial(walk.source.next, walk.prompt_ids, walk.response_ids, num_left)
            accepted, candidate = await self.target.apart(go_on)
            for token_id in accepted:
                walk.response_ids.append(token_id)
                if self.responses.ended(walk.response_ids):
                    candidate = None
                    break
            if candidate is not None:
                mismatch = await walk.label(candidate)
                walk.mismatches.append(mismatch)
                walk.response_ids.append(candidate.fallback_id if mismatch.important else candidate.draft_id)
        return ProblemLabels(
            problem_id=problem.problem_id,
            status=MINED,
            prompt_ids=tuple(walk.prompt_ids),
            target_ids=(),
            response_ids=tuple(walk.response_ids),
            target_answer=self.responses.answer(walk.response_ids),
            mismatches=tuple(walk.mismatches),
            seconds=time.perf_counter() - started,
            num_generated=walk.num_generated,
            source="pivot",
        )


class _Walk:
    """State of one problem's walk."""

    def __init__(self, miner: PivotMiner, problem: TaskProblem) -> None:
        self.miner = miner
        self.problem = problem
        self.seed = miner.make_seed(problem)
        self.source = miner.make_source(self.seed)
        self.prompt_ids = miner.responses.encode_prompt(problem)
        self.response_ids: list[int] = []
        self.mismatches: list[Mismatch] = []
        self.session = Session()
        self.num_generated = 0

    async def label(self, candidate: Candidate) -> Mismatch:
        """Compute utilities on both sides, compare them, and check soundness."""
        with_candidate = [*self.response_ids, candidate.draft_id]
        base, tried = await gather_all([self._rollouts(self.response_ids, 0), self._rollouts(with_candidate, 1)])
        right = [await gather_all([self._correct(response) for response in rollouts]) for rollouts in (base, tried)]
        base_utility, candidate_utility = (sum(verdicts) / len(verdicts) for verdicts in right)
        important = candidate_utility < self.miner.alpha * base_utility
        reason, verdict = "", NOT_ASKED
        if not important and self.miner.soundness is not None:
            correct = [response for response, is_right in zip(tried, right[1], strict=True) if is_right]
            if correct:
                verdict = await self._ask(median_length(correct))
                if verdict == UNSOUND:
                    important, reason = True, "the judge found its correct rollout unsound"
        return Mismatch(
            position=len(self.response_ids),
            target_id=candidate.fallback_id,
            draft_id=candidate.draft_id,
            important=important,
            reason=reason,
            continuation_ids=tuple(tried[0][len(with_candidate) :]),
            answer=self.miner.responses.answer(tried[0]),
            base_utility=base_utility,
            candidate_utility=candidate_utility,
            num_rollouts=self.miner.num_rollouts,
            verdict=verdict,
        )

    async def _rollouts(self, response_ids: list[int], side: int) -> list[list[int]]:
        """Sample N continuations from the target, as whole responses; return N copies if the response has ended."""
        num_left = self.miner.responses.num_left(response_ids)
        if num_left < 1:
            return [list(response_ids)] * self.miner.num_rollouts
        draws = [seeded_draw(self.seed, len(response_ids), side, number) for number in range(self.miner.num_rollouts)]
        continuations = await self.miner.target.complete_all(
            self.session, self.prompt_ids, response_ids, num_left, draws
        )
        if continuations is None:
            raise SpecError("rollouts need a target that takes token ids; a text API may tokenize differently")
        self.num_generated += sum(map(len, continuations))
        return [[*response_ids, *new] for new in continuations]

    async def _correct(self, response_ids: list[int]) -> bool:
        return await self.miner.responses.correct(response_ids, self.problem.reference)

    async def _ask(self, response_ids: list[int]) -> str:
        assert self.miner.soundness is not None
        text = self.miner.responses.text(response_ids)
        return await self.miner.soundness.judge(self.problem.question_text, self.problem.reference, text)


def median_length(responses: list[list[int]]) -> list[int]:
    """Return the response of median length (the longer of the middle two), as representative of all."""
    return sorted(responses, key=len)[len(responses) // 2]


def seeded_draw(*key: int) -> Draw:
    """Return the random draws of one rollout, reproducible from its key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    seed = int.from_bytes(digest, "little")
    generator = torch.Generator().manual_seed(seed)
    return UniformDraw(lambda: float(torch.rand((), generator=generator, dtype=torch.float64)), seed)
