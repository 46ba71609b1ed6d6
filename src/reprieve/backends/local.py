"""The engine on this machine: one answer at a time, in this process or in several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from reprieve.backends.workers import WorkerPool
from reprieve.bench.answering import Answerer, reply_of
from reprieve.bench.arms import Arm
from reprieve.bench.config import RunConfig
from reprieve.bench.engine import EngineFacts, Job
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.drafters import DRAFTERS
from reprieve.engine import DRAFT_ONLY, FoldedDecoder, Pair, SamplingParams, load_pair
from reprieve.engine.pair import start_worker
from reprieve.errors import require_whole
from reprieve.settings import NumDraftTokens, PromptSettings
from reprieve.tasks import Task, TaskProblem, load_task
from reprieve.tasks.prompting import with_prompts


class LocalEngine:
    """See `Engine`.

    Args:
        num_workers: number of processes that answer in parallel. Do not time with more than one: processes slow each
            other down.

    Raises:
        SpecError: `num_workers` outside 1 to 1,024.
    """

    def __init__(self, pair: Pair, *, num_workers: int = 1) -> None:
        require_whole("workers", num_workers, 1, 1024)
        self.pair = pair
        self.tokenizer = pair.tokenizer
        self.num_parallel = num_workers
        self.facts = EngineFacts(pair.identity, pair.dtype, str(pair.device))
        self.num_positions = pair.num_positions
        self._decoders: dict[str, FoldedDecoder] = {}
        self._config: RunConfig | None = None
        self._arms: dict[str, Arm] = {}
        self._pool: WorkerPool | None = None
        self._known: tuple[RunConfig, set[str]] | None = None  # of the pool

    def fingerprints(self, drafter: str) -> dict[str, str]:
        """See `Engine`."""
        return DRAFTERS.make(drafter).fingerprints(self.pair)

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        """See `Engine`."""
        if arm.rule is None:
            return arm.num_draft_tokens
        head = self.pair.length_head(arm.num_draft_tokens, arm.rule, DRAFTERS.make(arm.drafter or drafter))
        return arm.num_draft_tokens if head is None else head.certified()

    def refusal(self, arm: Arm, drafter: str) -> str:
        """See `Engine`."""
        if arm.vllm:
            return f"{arm.label} is vLLM's own method: use --engine vllm"
        needs_draft = arm.label == DRAFT_ONLY
        return "the pair has no draft" if needs_draft and self.pair.draft is None else ""

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """See `Engine`."""
        self._arms |= {arm.label: arm for arm in arms}

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """See `Engine`. An arm that cannot be built fails here, not in every worker."""
        if config != self._config:
            self._config, self._decoders = config, {}
        by_label = {arm.label: arm for arm in arms}
        answerer = Answerer(config, task, self.tokenizer, self._decode)
        for label in dict.fromkeys(job.arm for job in jobs):
            if label not in self._decoders:
                self._decoders[label] = self._decoder(config, by_label[label])
                asyncio.run(answerer.warm_up(by_label[label], problems[0]))
        if self.num_parallel > 1:
            yield from self._workers(config, arms).answer(jobs)
            return
        for job in jobs:
            problem = problems[job.number]
            yield asyncio.run(answerer.answer(by_label[job.arm], problem, job.number, job.trial))

    def close(self) -> None:
        """End worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _workers(self, config: RunConfig, arms: Sequence[Arm]) -> WorkerPool:
        """Return a pool of processes that know this run and these arms; start a new one if needed."""
        self.expect(arms, config.drafter)
        labels = {arm.label for arm in arms}
        known = self._known
        if self._pool is None or known is None or known[0] != config or not labels <= known[1]:
            self.close()
            arms = list(self._arms.values())
            self._known = config, {arm.label for arm in arms}
            self._pool = WorkerPool(self.num_parallel, start=_start, arguments=(config, arms), answer=_answer)
        return self._pool

    def _decoder(self, config: RunConfig, arm: Arm) -> FoldedDecoder:
        conditions = config.conditions(self, arm)
        return arm.decoders(self.pair, drafter=config.drafter, task=config.task, conditions=conditions)

    async def _decode(self, arm: Arm, problem: TaskProblem, prompt: str | list[int], params: SamplingParams) -> Reply:
        decoder = self._decoders[arm.label].outside(problem.problem_id)
        generation = decoder.generate(prompt, params, timed=True)
        return reply_of(arm, generation, self.tokenizer, params.stop)


class _Worker:
    """State that a worker process keeps between jobs."""

    def __init__(self, config: RunConfig, arms: Sequence[Arm]) -> None:
        pair = load_pair(config.target, config.draft, dtype=config.dtype, device=config.device)
        self.config, self.arms = config, arms
        self.task = with_prompts(load_task(config.task), pair.tokenizer, PromptSettings(**config.prompt))
        self.problems = self.task.problems(config.split, config.limit, offset=config.offset)
        self.engine = LocalEngine(pair)
        if pair.num_positions is not None:
            self.task.fit(self.problems, pair.num_positions)

    def answer(self, jobs: Sequence[Job]) -> list[ProblemRecord]:
        return list(self.engine.answer(self.config, self.task, self.arms, self.problems, jobs))


_WORKER: _Worker | None = None


def _start(config: RunConfig, arms: Sequence[Arm]) -> None:
    """Load the pair once a process."""
    global _WORKER
    start_worker()
    _WORKER = _Worker(config, arms)


def _answer(jobs: Sequence[Job]) -> list[ProblemRecord]:
    assert _WORKER is not None
    return _WORKER.answer(jobs)
