"""Several processes answer side by side, each with the pair in its own memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from reprieve.errors import ReprieveError
from reprieve.evaluation.answering import Answerer
from reprieve.evaluation.arms import Arm
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
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(config, list(arms)))
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

    def __init__(self, config: RunConfig, arms: Sequence[Arm]) -> None:
        from reprieve.engine import load_pair
        from reprieve.settings import PromptSettings
        from reprieve.tasks import load_task
        from reprieve.tasks.asking import ask

        pair = load_pair(config.target, config.draft, dtype=config.dtype, device=config.device)
        task = ask(load_task(config.task), pair.tokenizer, PromptSettings(**config.prompt))
        self.problems = task.problems(config.split, config.limit, offset=config.offset)
        self.answerer = Answerer(config, pair, task)
        self.arms = {arm.label: arm for arm in arms}

    def answer(self, job: Job) -> ProblemRecord:
        return self.answerer.answer(self.arms[job.arm], self.problems[job.number], job.number, job.trial)


_WORKER: _Worker | None = None


def _start(config: RunConfig, arms: Sequence[Arm]) -> None:
    """Load the pair once a process."""
    global _WORKER
    start_worker()
    _WORKER = _Worker(config, arms)


def _answer(jobs: Sequence[Job]) -> list[ProblemRecord]:
    assert _WORKER is not None
    return [_WORKER.answer(job) for job in jobs]
