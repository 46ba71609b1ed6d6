"""Engines on this machine: `local` decodes one answer at a time per process, `batched` many in each forward."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from reprieve.backends.settings import SERVED_DRAFT_TOKENS
from reprieve.bench.arms import Arm
from reprieve.bench.engine import Answerer, Engine, EngineFacts, Job, RunConfig
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.concurrency import iterate, results_of
from reprieve.drafters import DRAFTERS, EagleSettings
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder, load_pair
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request
from reprieve.engine.batched import refusal as rule_refusal
from reprieve.engine.batches import Stepper
from reprieve.engine.pair import start_worker
from reprieve.errors import EngineError, require_whole
from reprieve.models.cached_model import shared_length
from reprieve.rules import LosslessRule, Rule
from reprieve.settings import NumDraftTokens
from reprieve.tasks import Task, TaskProblem, load_task
from reprieve.tasks.prompting import problems_of, prompt_ids_of, with_prompts
from reprieve.types import Generation

_CHUNK = 4  # answers that a worker process makes before it returns them
_COMPARED = 64  # prompts compared to find the common prefix


class PairEngine(Engine):
    """Engine whose pair is loaded in this process."""

    kind: str

    def __init__(self, pair: Pair, num_parallel: int) -> None:
        self.pair = pair
        self.tokenizer = pair.tokenizer
        self.num_parallel = num_parallel
        self.num_positions = pair.num_positions

    @property
    def facts(self) -> EngineFacts:
        pair = self.pair
        return EngineFacts(pair=pair.identity, dtype=pair.dtype, device=str(pair.device), engine=self.kind)

    def fingerprints(self, drafter: str) -> dict[str, str]:
        return DRAFTERS.make(drafter).fingerprints(self.pair)

    def refusal(self, arm: Arm, drafter: str) -> str:
        if arm.vllm:
            return f"{arm.label} is vLLM's own method: use --engine vllm"
        return "the pair has no draft" if arm.alone == "draft" and self.pair.draft is None else ""


class LocalEngine(PairEngine):
    """Decodes one answer at a time, in this process or in several.

    Args:
        num_workers: number of processes that answer in parallel. Do not time with more than one: processes slow each
            other down.

    Raises:
        SpecError: `num_workers` outside 1 to 1,024.
    """

    kind = "local"

    def __init__(self, pair: Pair, *, num_workers: int = 1) -> None:
        require_whole("workers", num_workers, 1, 1024)
        super().__init__(pair, num_workers)
        self._arms: dict[str, Arm] = {}
        self._config: RunConfig | None = None  # of the run in progress
        self._prefix: list[int] = []  # shared by its prompts
        self._decoders: dict[str, SpeculativeDecoder] = {}  # of its arms
        self._pool: ProcessPoolExecutor | None = None
        self._pool_knows: tuple[RunConfig, set[str]] | None = None

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        if arm.rule is None:
            return arm.num_draft_tokens
        head = self.pair.select_length_head(arm.num_draft_tokens, arm.rule, DRAFTERS.make(arm.drafter or drafter))
        return arm.num_draft_tokens if head is None else head.certified()

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        self._arms |= {arm.label: arm for arm in arms}

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """See `Engine`. An arm that cannot be built fails here, not in every worker."""
        if self._config != config:
            self._config, self._decoders, self._prefix = config, {}, self._shared_prefix(problems)
        by_label = {arm.label: arm for arm in arms}

        async def decode(arm: Arm, prompt_ids: list[int], params: SamplingParams) -> Reply:
            return reply_of(arm, self._decoders[arm.label].generate(prompt_ids, params, timed=True))

        answerer = Answerer(config, task, self.tokenizer, arms, problems, decode)
        for label in dict.fromkeys(job.arm for job in jobs):
            if label not in self._decoders:
                self._decoders[label] = self._decoder(config, by_label[label])
                asyncio.run(answerer.warm_up(by_label[label]))
        if self.num_parallel > 1:
            yield from self._answer_in_workers(config, arms, jobs)
            return
        for job in jobs:
            yield asyncio.run(answerer.answer(job))

    def close(self) -> None:
        """End worker processes, each after the chunk that it works on."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _answer_in_workers(
        self, config: RunConfig, arms: Sequence[Arm], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """Yield records as they complete. The processes are kept for later calls; Ctrl-C drops the jobs in progress."""
        pool = self._started(config, arms)
        waiting = [pool.submit(_answer, jobs[at : at + _CHUNK]) for at in range(0, len(jobs), _CHUNK)]
        try:
            for future in as_completed(waiting):
                yield from future.result()
        except BrokenProcessPool:
            raise EngineError("a worker process died") from None
        finally:
            for future in waiting:
                future.cancel()

    def _started(self, config: RunConfig, arms: Sequence[Arm]) -> ProcessPoolExecutor:
        """Return a pool of processes that know this run and all arms so far; start a new one if needed."""
        self.expect(arms, config.drafter)
        known = config, set(self._arms)
        if self._pool is None or self._pool_knows != known:
            self.close()
            self._pool_knows = known
            self._pool = ProcessPoolExecutor(
                self.num_parallel,
                multiprocessing.get_context("spawn"),
                initializer=_start,
                initargs=(config, list(self._arms.values())),
            )
        return self._pool

    def _decoder(self, config: RunConfig, arm: Arm) -> SpeculativeDecoder:
        conditions = config.conditions(self, arm)
        decoder = arm.decoder(self.pair, drafter=config.drafter, task=config.task, conditions=conditions)
        decoder.share_prefix(self._prefix)
        return decoder

    def _shared_prefix(self, problems: Sequence[TaskProblem]) -> list[int]:
        """Return the prompt tokens that the first problems share, such as a system prompt and examples."""
        prompts = [prompt_ids_of(problem, self.tokenizer) for problem in problems[:_COMPARED]]
        # The lexicographic minimum and maximum share exactly the prefix that all prompts share.
        return prompts[0][: shared_length(min(prompts), max(prompts))]


class BatchedEngine(PairEngine):
    """Decodes many answers at once. All arms with one K share a batch; each model alone has its own."""

    kind = "batched"

    def refusal(self, arm: Arm, drafter: str) -> str:
        if reason := super().refusal(arm, drafter):
            return reason
        if arm.truncation is not None:
            return "direct: arms need --engine local"
        if arm.rule is None:
            return ""
        if isinstance(arm.num_draft_tokens, str):
            k = arm.num_draft_tokens
            return f"engine batched needs a number of draft tokens, such as @K={SERVED_DRAFT_TOKENS}, got {k}"
        settings = DRAFTERS.make(arm.drafter or drafter)
        if isinstance(settings, EagleSettings):
            if settings.drafts_trees:
                return f"engine batched drafts chains: top_k of the drafter must be 1, got {settings.top_k}"
            if settings.prune is not None:
                return f"engine batched drafts chains: the drafter must not prune, got prune={settings.prune}"
        elif settings.name != "draft":
            return f"engine batched needs the drafter draft or eagle3, got {settings.name}; use --engine local"
        return rule_refusal(arm.rule, eagle=isinstance(settings, EagleSettings))

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        for arm in arms:
            config.require_arm_fits(self, arm)
        groups = {arm.label: group_of(arm, config.drafter) for arm in arms}
        rules = {arm.label: (arm.rule or LosslessRule()).bind(self.tokenizer).to(self.pair.device) for arm in arms}
        batches: dict[DecoderGroup, Stepper[Request, Generation]] = {}

        async def decode(arm: Arm, prompt_ids: list[int], params: SamplingParams) -> Reply:
            generation = await batches[groups[arm.label]].result(
                lambda finish: Request(prompt_ids, rules[arm.label], params.max_new_tokens, finish, seed=params.seed)
            )
            return reply_of(arm, generation)

        answerer = Answerer(config, task, self.tokenizer, arms, problems, decode)
        for key in {groups[job.arm]: None for job in jobs}:
            members = [rules[label] for label, group in groups.items() if group == key]
            num_rows = min(self.num_parallel, sum(groups[job.arm] == key for job in jobs))
            batches[key] = Stepper(key.decoder(self.pair, members, num_rows=num_rows, params=answerer.params))

        with asyncio.Runner() as loop:  # each batch queues what has no row yet, so all arms stay on the same problems
            results = results_of(jobs, answerer.answer, num_parallel=self.num_parallel * len(batches))
            yield from iterate(loop, results)


class DecoderGroup(NamedTuple):
    """Settings of a batch's decoder; arms of one group share it."""

    draft_alone: bool
    num_draft_tokens: int
    eagle: EagleSettings | None  # None drafts with the draft model

    def decoder(
        self, pair: Pair, rules: Sequence[Rule], *, num_rows: int, params: SamplingParams
    ) -> BatchedSpeculativeDecoder:
        """Return a decoder for arms with these rules, which are bound and on the pair's device."""
        return BatchedSpeculativeDecoder(
            pair,
            num_rows=num_rows,
            num_draft_tokens=self.num_draft_tokens,
            params=params,
            rules=rules,
            eagle=None if self.eagle is None else pair.eagle_head(self.eagle.source(pair.target_name)),
            draft_alone=self.draft_alone,
        )


def group_of(arm: Arm, drafter: str) -> DecoderGroup:
    """Return the group of an arm that the engine does not refuse, with the run's drafter."""
    if arm.rule is None:
        return DecoderGroup(arm.alone == "draft", 0, None)
    assert isinstance(arm.num_draft_tokens, int)
    settings = DRAFTERS.make(arm.drafter or drafter)
    if not isinstance(settings, EagleSettings):
        return DecoderGroup(False, arm.num_draft_tokens, None)
    return DecoderGroup(False, min(arm.num_draft_tokens, settings.depth, settings.total_tokens), settings)


def reply_of(arm: Arm, generation: Generation) -> Reply:
    """Convert the local engine's output to the `Reply` that all engines return."""
    reply = Reply(
        text=generation.text,
        finish_reason=generation.finish_reason,
        spans=spans_of(generation.pieces),
        **generation.stats,
    )
    return dataclasses.replace(reply, num_rounds=0) if arm.alone == "draft" else reply  # rounds are target forwards


def spans_of(pieces: Sequence[tuple[str, str]]) -> list[list[Any]]:
    """Merge neighbouring pieces of equal provenance: number of characters; t (target), m (matched) or r (rescued).

    Args:
        pieces: see `Generation.pieces`.
    """
    runs = groupby((piece for piece in pieces if piece[0]), key=itemgetter(1))
    return [[sum(len(text) for text, _ in run), provenance[0]] for provenance, run in runs]


_ANSWER: Callable[[Sequence[Job]], Iterator[ProblemRecord]] | None = None  # of a worker process


def _start(config: RunConfig, arms: Sequence[Arm]) -> None:
    """Load the pair and the problems, once in each worker process."""
    global _ANSWER
    start_worker()
    pair = load_pair(config.target, config.draft, dtype=config.dtype, device=config.device)
    task = with_prompts(load_task(config.task), pair.tokenizer, config.prompt)
    problems = problems_of(task, config, pair.num_positions)
    _ANSWER = partial(LocalEngine(pair).answer, config, task, arms, problems)


def _answer(jobs: Sequence[Job]) -> list[ProblemRecord]:
    assert _ANSWER is not None
    return list(_ANSWER(jobs))
