"""The engine on this machine: one answer at a time, in this process or in several."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial

from reprieve.bench.answering import Answerer, reply_of
from reprieve.bench.arms import Arm
from reprieve.bench.engine import Engine, EngineFacts, Job, RunConfig
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.drafters import DRAFTERS
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder, load_pair
from reprieve.engine.pair import start_worker
from reprieve.errors import EngineError, require_whole
from reprieve.models.cached_model import shared_length
from reprieve.settings import NumDraftTokens
from reprieve.tasks import Task, TaskProblem, load_task
from reprieve.tasks.prompting import problems_of, prompt_ids_of, with_prompts

_CHUNK = 4  # answers that a worker process makes before it returns them
_COMPARED = 64  # prompts compared to find the common prefix


@dataclass
class _RunState:
    """The run in progress: the beginning that its prompts share, and the decoder of each arm."""

    config: RunConfig
    prefix: list[int]
    decoders: dict[str, SpeculativeDecoder] = field(default_factory=dict)

    async def decode(self, arm: Arm, problem: TaskProblem, prompt: str | list[int], params: SamplingParams) -> Reply:
        return reply_of(arm, self.decoders[arm.label].generate(prompt, params, timed=True))


@dataclass
class _Workers:
    """Worker processes prepared for one run and some of its arms."""

    config: RunConfig
    labels: set[str]
    pool: ProcessPoolExecutor

    def prepared_for(self, config: RunConfig, arms: Sequence[Arm]) -> bool:
        return self.config == config and {arm.label for arm in arms} <= self.labels


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
        self._run: _RunState | None = None
        self._workers: _Workers | None = None

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
        if self._run is None or self._run.config != config:
            self._run = _RunState(config, self._shared_prefix(problems))
        decoders = self._run.decoders
        by_label = {arm.label: arm for arm in arms}
        answerer = Answerer(config, task, self.tokenizer, arms, problems, self._run.decode)
        for label in dict.fromkeys(job.arm for job in jobs):
            if label not in decoders:
                decoders[label] = self._decoder(self._run, by_label[label])
                asyncio.run(answerer.warm_up(by_label[label]))
        if self.num_parallel > 1:
            yield from self._answer_in_workers(config, arms, jobs)
            return
        for job in jobs:
            yield asyncio.run(answerer.answer(job))

    def close(self) -> None:
        """End worker processes, each after the chunk that it works on."""
        if self._workers is not None:
            self._workers.pool.shutdown(wait=False, cancel_futures=True)
            self._workers = None

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
        """Return a pool of processes that know this run and these arms; start a new one if needed."""
        self.expect(arms, config.drafter)
        if self._workers is None or not self._workers.prepared_for(config, arms):
            self.close()
            pool = ProcessPoolExecutor(
                self.num_parallel,
                multiprocessing.get_context("spawn"),
                initializer=_start,
                initargs=(config, list(self._arms.values())),
            )
            self._workers = _Workers(config, set(self._arms), pool)
        return self._workers.pool

    def _decoder(self, run: _RunState, arm: Arm) -> SpeculativeDecoder:
        config = run.config
        conditions = config.conditions(self, arm)
        decoder = arm.decoder(self.pair, drafter=config.drafter, task=config.task, conditions=conditions)
        decoder.share_prefix(run.prefix)
        return decoder

    def _shared_prefix(self, problems: Sequence[TaskProblem]) -> list[int]:
        """Return the prompt tokens that the first problems share, such as a system prompt and examples."""
        prompts = [prompt_ids_of(problem, self.tokenizer) for problem in problems[:_COMPARED]]
        # The lexicographic minimum and maximum share exactly the prefix that all prompts share.
        return prompts[0][: shared_length(min(prompts), max(prompts))]


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
