"""The engine on this machine, which generates many answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from reprieve.backends.concurrency import iterate, require_arm_fits, results_of
from reprieve.backends.settings import SERVED_DRAFT_TOKENS, BatchedSettings
from reprieve.bench.answering import Answerer, reply_of
from reprieve.bench.arms import Arm
from reprieve.bench.engine import EngineFacts, Job, RunConfig
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.drafters import DRAFTERS
from reprieve.engine import DRAFT_ONLY, Pair, SamplingParams
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request, refusal
from reprieve.engine.text import token_ids_of
from reprieve.errors import SpecError
from reprieve.models.batch_decoder import Stepper
from reprieve.rules import LosslessRule
from reprieve.settings import NumDraftTokens
from reprieve.tasks import Task, TaskProblem
from reprieve.types import Generation


class BatchedEngine:
    """See `Engine`. All arms with one K share a batch; each model alone has its own."""

    def __init__(self, pair: Pair, settings: BatchedSettings) -> None:
        self.pair = pair
        self.tokenizer = pair.tokenizer
        self.num_parallel = settings.parallel
        self.facts = EngineFacts(pair.identity, pair.dtype, str(pair.device), engine="batched")
        self.num_positions = pair.num_positions

    def fingerprints(self, drafter: str) -> dict[str, str]:
        """See `Engine`."""
        return DRAFTERS.make(drafter).fingerprints(self.pair)

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        """See `Engine`."""
        return arm.num_draft_tokens

    def refusal(self, arm: Arm, drafter: str) -> str:
        """See `Engine`."""
        if arm.vllm:
            return f"{arm.label} is vLLM's own method: use --engine vllm"
        if arm.truncation is not None or arm.folded:
            return f"{'a head trained out of fold' if arm.folded else 'direct:'} needs --engine local"
        if arm.rule is None:
            return "the pair has no draft" if arm.label == DRAFT_ONLY and self.pair.draft is None else ""
        if isinstance(arm.num_draft_tokens, str):
            k = arm.num_draft_tokens
            return f"engine batched needs a number of draft tokens, such as @K={SERVED_DRAFT_TOKENS}, got {k}"
        if (name := DRAFTERS.make(arm.drafter or drafter).name) != "draft":
            return f"engine batched needs the drafter draft, got {name}; use --engine local"
        return refusal(arm.rule)

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """See `Engine`; nothing to prepare."""

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """See `Engine`."""
        by_label = {arm.label: arm for arm in arms}
        for arm in arms:
            if reason := self.refusal(arm, config.drafter):
                raise SpecError(f"{arm.label}: {reason}")
            require_arm_fits(self, arm, config)
        batches: dict[tuple[bool, int], _Batch] = {}

        async def decode(arm: Arm, problem: TaskProblem, prompt: str | list[int], params: SamplingParams) -> Reply:
            generation = await batches[_group(arm)].generate(arm, prompt, params)
            return reply_of(arm, generation, self.tokenizer, params.stop)

        answerer = Answerer(config, task, self.tokenizer, decode)
        for key in {_group(by_label[job.arm]): None for job in jobs}:
            group = [arm for arm in arms if _group(arm) == key]
            # A resumed run must not repeat the draws that its first answers had.
            params = answerer.params.for_problem(jobs[0].number, jobs[0].trial)
            num_jobs = sum(_group(by_label[job.arm]) == key for job in jobs)
            batches[key] = _Batch(self.pair, group, min(self.num_parallel, num_jobs), params, key)

        async def answer(job: Job) -> ProblemRecord:
            return await answerer.answer(by_label[job.arm], problems[job.number], job.number, job.trial)

        with asyncio.Runner() as loop:  # each batch queues what has no row yet, so all arms stay on the same problems
            results = results_of(jobs, answer, num_parallel=self.num_parallel * len(batches))
            yield from iterate(loop, results)

    def close(self) -> None:
        """See `Engine`; nothing was started."""


def _group(arm: Arm) -> tuple[bool, int]:
    """Return which model decodes an arm alone, if one does, and its K; arms of one group share a batch."""
    if arm.rule is None:
        return arm.label == DRAFT_ONLY, 0
    assert isinstance(arm.num_draft_tokens, int)
    return False, arm.num_draft_tokens


class _Batch:
    """A decoder for several arms."""

    def __init__(
        self, pair: Pair, arms: Sequence[Arm], num_rows: int, params: SamplingParams, group: tuple[bool, int]
    ) -> None:
        self._tokenizer = pair.tokenizer
        self._num_ids = pair.num_token_ids
        self._rules = {arm.label: (arm.rule or LosslessRule()).bind(pair.tokenizer).to(pair.device) for arm in arms}
        draft_alone, num_draft_tokens = group
        decoder = BatchedSpeculativeDecoder(
            pair,
            num_rows=num_rows,
            num_draft_tokens=num_draft_tokens,
            params=params,
            rules=list(self._rules.values()),
            draft_alone=draft_alone,
        )
        self._stepper: Stepper[Request, Generation] = Stepper(decoder)

    async def generate(self, arm: Arm, prompt: str | list[int], params: SamplingParams) -> Generation:
        """Return the answer to a prompt."""
        prompt_ids = token_ids_of(self._tokenizer, prompt, self._num_ids)
        return await self._stepper.result(
            lambda finish: Request(prompt_ids, self._rules[arm.label], params.max_new_tokens, finish)
        )
