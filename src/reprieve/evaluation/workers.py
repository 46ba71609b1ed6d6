"""Several processes answer side by side, each with the pair in its own memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from reprieve.errors import ReprieveError, SpecError
from reprieve.evaluation.answering import Answerer
from reprieve.evaluation.arms import Arm, make_arms
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.records import ProblemRecord
from reprieve.models.worker_process import start_worker

_CHUNK = 4


@dataclass(frozen=True)
class Job:
    """One answer to be made: the arm's label, the problem's place in the run, and the trial."""

    arm: str
    number: int
    trial: int


def answer_in_processes(
    config: RunConfig, arms: Sequence[Arm], jobs: Sequence[Job], *, num_workers: int
) -> Iterator[ProblemRecord]:
    """Records as they come, in no particular order. Ctrl-C drops what is under way.

    Raises:
        ReprieveError: a worker died.
        SpecError: an arm that a text cannot name, so that another process cannot make it.
    """
    for arm in arms:
        if [other.label for other in make_arms([arm.label], [arm.num_draft_tokens])].count(arm.label) != 1:
            raise SpecError(f"arm {arm.label} cannot be made in another process; use one worker")
    ks = {arm.label: arm.num_draft_tokens for arm in arms}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(dataclasses.asdict(config), ks))
    try:
        chunks = [jobs[at : at + _CHUNK] for at in range(0, len(jobs), _CHUNK)]
        for future in as_completed([pool.submit(_answer, chunk) for chunk in chunks]):
            yield from future.result()
    except BrokenProcessPool:
        raise ReprieveError("a worker process died; what was answered is kept, run again to go on") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """What a worker process keeps between jobs."""

    def __init__(self, config: RunConfig, ks: dict[str, int]) -> None:
        from reprieve.models import load_pair
        from reprieve.tasks import load_task

        pair = load_pair(config.target, config.draft, dtype=config.dtype, device=config.device)
        task = load_task(config.task)
        self.problems = task.problems(config.split, config.limit, offset=config.offset)
        self.answerer = Answerer(config, pair, task)
        self.arms = {arm.label: arm for label, k in ks.items() for arm in make_arms([label], [k])}

    def answer(self, job: Job) -> ProblemRecord:
        return self.answerer.answer(self.arms[job.arm], self.problems[job.number], job.number, job.trial)


_WORKER: _Worker | None = None


def _start(config: dict[str, Any], ks: dict[str, int]) -> None:
    """Load the pair once a process."""
    global _WORKER
    start_worker()
    _WORKER = _Worker(RunConfig(**config), ks)


def _answer(jobs: Sequence[Job]) -> list[ProblemRecord]:
    assert _WORKER is not None
    return [_WORKER.answer(job) for job in jobs]
