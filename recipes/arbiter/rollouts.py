"""Answers decoded with a sampled arbitration policy, for training, and with a fixed lambda, for validation.

The engine's own loop decodes them; several processes may share the work, each with the pair in its own memory.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Self

from safetensors.torch import load, save
from torch import Tensor

from recipes.arbiter.rewards import Decision, Rollout, RolloutRound
from recipes.arbiter.settings import RolloutSettings
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder, load_pair
from reprieve.engine.pair import start_worker
from reprieve.errors import ReprieveError, SpecError, require_whole
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.settings import ArbiterShape
from reprieve.models.arbiter import ArbiterAdvisor, ArbiterModel, ArbitrationRound
from reprieve.rules import Rule, Traits
from reprieve.rules.arbiter import ArbiterRule
from reprieve.tasks import Task, TaskProblem, load_task
from reprieve.tasks.prompting import prompt_ids_of, with_prompts
from reprieve.types import Evidence, Generation, Need

_CHUNK = 4


@dataclass(frozen=True)
class SampledArbiterRule(Rule):
    """Accept a mismatch with probability pi(accept), CoSpec's exploration (section 3.4).

    Args:
        reads: inputs of the arbiter other than the tokens.
    """

    name = "sampled_arbiter"
    own_traits = Traits(needs=frozenset({Need.ADVICE, Need.NOISE}), check="exact", beyond_truncation=True)

    reads: frozenset[Need] = frozenset()

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(self.own_traits, needs=self.own_traits.needs | self.reads)

    @property
    def threshold(self) -> float:
        return 0.0

    def risk(self, evidence: Evidence) -> Tensor:
        """Return a uniform draw minus pi(accept), which is at most 0 with probability pi(accept)."""
        assert evidence.advice is not None and evidence.noise is not None
        return evidence.noise - evidence.advice


def rollout_of(generation: Generation, *, correct: bool) -> Rollout:
    """Return an answer's rounds with their effective decisions (Eq. 16 and 18).

    Mismatches after the end of the answer had no effect and are left out.
    """
    assert generation.trace is not None
    rounds = []
    start = len(generation.prompt_ids)
    for traced in generation.trace:
        decisions = []
        for position, (draft_id, target_id) in enumerate(
            zip(traced.drafted_ids, traced.target_ids, strict=True), start=1
        ):
            if position > len(traced.committed):
                break
            if draft_id == target_id:
                continue
            assert traced.advice is not None
            accepted = position <= len(traced.path)
            decisions.append(
                Decision(position, accepted, traced.target_log_probs[position - 1], traced.advice[position - 1])
            )
            if not accepted:
                break
        if decisions:
            arbitration = ArbitrationRound(start, tuple(traced.drafted_ids), tuple(traced.target_ids))
            rounds.append(RolloutRound(arbitration, tuple(decisions)))
        start += len(traced.committed)
    return Rollout((*generation.prompt_ids, *generation.token_ids), tuple(rounds), correct)


@dataclass(frozen=True)
class RolloutJob:
    """One answer to decode: a problem's index in its split, a seed, and a threshold; None samples decisions."""

    split: str
    number: int
    seed: int
    threshold: float | None = None


@dataclass(frozen=True)
class Validated:
    """Outcome of an answer decoded at a fixed lambda."""

    correct: bool
    num_tokens: int
    num_rounds: int


class RolloutMaker:
    """Decodes jobs in this process.

    Raises:
        SpecError: a pair without a draft.
    """

    def __init__(self, settings: RolloutSettings, shape: ArbiterShape, pair: Pair, task: Task) -> None:
        if pair.draft is None:
            raise SpecError("arbitration needs a draft; name one with --draft")
        self.settings = settings
        self.pair = pair
        self.task = task
        self.model = ArbiterModel(pair.draft, shape)
        self.num_draft_tokens = settings.num_draft_tokens or 16
        self._problems: dict[tuple[str, int], TaskProblem] = {}
        self._decoders: dict[float | None, SpeculativeDecoder] = {}  # by threshold

    def make(self, jobs: Sequence[RolloutJob], tensors: Mapping[str, Tensor]) -> list[Rollout | Validated]:
        """Decode jobs with these weights of the arbiter."""
        self.model.load_own(tensors)
        return [self._one(job) for job in jobs]

    def _one(self, job: RolloutJob) -> Rollout | Validated:
        problem = self._problem(job)
        sampled = job.threshold is None
        params = SamplingParams(
            max_new_tokens=self.task.max_new_tokens,
            temperature=self.settings.temperature if sampled else self.settings.validation_temperature,
            draft_temperature=self.settings.draft_temperature,
            stop=tuple(self.task.stop),
            seed=job.seed,
        )
        if job.threshold not in self._decoders:
            self._decoders[job.threshold] = self._decoder(job.threshold)
        prompt_ids = prompt_ids_of(problem, self.pair.tokenizer)
        generation = self._decoders[job.threshold].generate(prompt_ids, params, trace=sampled)
        correct = self.task.equivalent(self.task.extract_answer(generation.text), problem.reference)
        return (
            rollout_of(generation, correct=correct)
            if sampled
            else Validated(correct, len(generation.tokens), generation.num_rounds)
        )

    def _decoder(self, threshold: float | None) -> SpeculativeDecoder:
        k, identity, task = self.num_draft_tokens, self.pair.identity, self.settings.task
        # The advisor holds the weights.
        head = Arbiter({}, self.model.shape, 0.5 if threshold is None else threshold, k, pair=identity, task=task)
        rule: Rule = SampledArbiterRule(head.needs) if threshold is None else ArbiterRule.of(head)
        return self.pair.decoder(rule, num_draft_tokens=k, advisor=ArbiterAdvisor(self.model))

    def _problem(self, job: RolloutJob) -> TaskProblem:
        key = (job.split, job.number)
        if key not in self._problems:
            self._problems[key] = self.task.problems(job.split, 1, offset=job.number)[0]
        return self._problems[key]


class RolloutPool:
    """Decodes jobs in several processes and keeps their order; a single worker runs in this process.

    Raises:
        SpecError: no workers.
    """

    def __init__(
        self, settings: RolloutSettings, shape: ArbiterShape, pair: Pair, task: Task, *, num_workers: int = 1
    ) -> None:
        require_whole("workers", num_workers, 1, 1024)
        self._here = RolloutMaker(settings, shape, pair, task) if num_workers == 1 else None
        self._pool: ProcessPoolExecutor | None = None
        if num_workers > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(settings, shape))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def make(self, jobs: Sequence[RolloutJob], tensors: Mapping[str, Tensor]) -> list[Any]:
        """Return a `Rollout` for each job with sampled decisions, and a `Validated` for each with a threshold.

        Raises:
            ReprieveError: a worker died.
        """
        if self._here is not None:
            return self._here.make(jobs, tensors)
        assert self._pool is not None
        weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        chunks = [list(jobs[at : at + _CHUNK]) for at in range(0, len(jobs), _CHUNK)]
        try:
            results = self._pool.map(_make, chunks, [weights] * len(chunks))
            return [item for part in results for item in part]
        except BrokenProcessPool:
            raise ReprieveError("a worker process died; run again to resume from the last checkpoint") from None


_MAKER: RolloutMaker | None = None


def _start(settings: RolloutSettings, shape: ArbiterShape) -> None:
    """Load the pair once per process."""
    global _MAKER
    start_worker()
    pair = load_pair(**settings.pair.models)
    task = with_prompts(load_task(settings.task), pair.tokenizer, settings.prompt)
    _MAKER = RolloutMaker(settings, shape, pair, task)


def _make(jobs: Sequence[RolloutJob], weights: bytes) -> list[Rollout | Validated]:
    assert _MAKER is not None
    return _MAKER.make(jobs, load(weights))
