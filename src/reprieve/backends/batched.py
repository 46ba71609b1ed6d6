"""The engine on this machine, which generates many answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reprieve.backends.local import PairEngine
from reprieve.backends.settings import SERVED_DRAFT_TOKENS, BatchedSettings
from reprieve.bench.answering import Answerer, reply_of
from reprieve.bench.arms import Arm
from reprieve.bench.engine import Job, RunConfig
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.concurrency import iterate, results_of
from reprieve.drafters import DRAFTERS, EagleSettings
from reprieve.engine import Pair, SamplingParams
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request, refusal
from reprieve.engine.batches import Stepper
from reprieve.engine.text import token_ids_of
from reprieve.errors import SpecError
from reprieve.rules import LosslessRule, Rule
from reprieve.tasks import Task, TaskProblem
from reprieve.types import Generation


class BatchedEngine(PairEngine):
    """Decodes many answers at once. All arms with one K share a batch; each model alone has its own."""

    kind = "batched"

    def __init__(self, pair: Pair, settings: BatchedSettings) -> None:
        super().__init__(pair, settings.parallel)

    def refusal(self, arm: Arm, drafter: str) -> str:
        if reason := super().refusal(arm, drafter):
            return reason
        if arm.truncation is not None:
            return "direct: needs --engine local"
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
        return refusal(arm.rule, eagle=isinstance(settings, EagleSettings))

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        for arm in arms:
            if reason := self.refusal(arm, config.drafter):
                raise SpecError(f"{arm.label}: {reason}")
            config.require_arm_fits(self, arm)
        groups = {arm.label: group_of(arm, config.drafter) for arm in arms}
        batches: dict[DecoderGroup, _Batch] = {}

        async def decode(arm: Arm, problem: TaskProblem, prompt: str | list[int], params: SamplingParams) -> Reply:
            generation = await batches[groups[arm.label]].generate(arm, prompt, params)
            return reply_of(arm, generation)

        answerer = Answerer(config, task, self.tokenizer, arms, problems, decode)
        for key in {groups[job.arm]: None for job in jobs}:
            group = [arm for arm in arms if groups[arm.label] == key]
            num_jobs = sum(groups[job.arm] == key for job in jobs)
            batches[key] = _Batch(self.pair, group, min(self.num_parallel, num_jobs), answerer.params, key)

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


class _Batch:
    """A decoder for several arms."""

    def __init__(
        self, pair: Pair, arms: Sequence[Arm], num_rows: int, params: SamplingParams, group: DecoderGroup
    ) -> None:
        self._tokenizer = pair.tokenizer
        self._num_ids = pair.num_token_ids
        self._rules = {arm.label: (arm.rule or LosslessRule()).bind(pair.tokenizer).to(pair.device) for arm in arms}
        decoder = group.decoder(pair, list(self._rules.values()), num_rows=num_rows, params=params)
        self._stepper: Stepper[Request, Generation] = Stepper(decoder)

    async def generate(self, arm: Arm, prompt: str | list[int], params: SamplingParams) -> Generation:
        """Return the answer to a prompt."""
        prompt_ids = token_ids_of(self._tokenizer, prompt, self._num_ids)
        return await self._stepper.result(
            lambda finish: Request(prompt_ids, self._rules[arm.label], params.max_new_tokens, finish, seed=params.seed)
        )
