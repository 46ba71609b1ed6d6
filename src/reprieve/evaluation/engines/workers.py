"""Several processes answer side by side, each with the pair in its own memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from reprieve.errors import EngineError
from reprieve.evaluation.arms import Arm
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.engines.base import Job
from reprieve.evaluation.records import ProblemRecord
from reprieve.models.worker_process import start_worker

_CHUNK = 4


class WorkerPool:
    """Processes for one run; they stay until it is closed, so that a second call finds them ready.

    Args:
        arms: those that may be asked for.
    """

    def __init__(self, config: RunConfig, arms: Sequence[Arm], *, num_workers: int) -> None:
        self.config = config
        self.labels = {arm.label for arm in arms}
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(config, list(arms)))

    def answer(self, jobs: Sequence[Job]) -> Iterator[ProblemRecord]:
        """Records as they come, in no particular order. Ctrl-C drops what is under way.

        Raises:
            EngineError: a worker died.
        """
        chunks = [jobs[at : at + _CHUNK] for at in range(0, len(jobs), _CHUNK)]
        waiting = [self._pool.submit(_answer, chunk) for chunk in chunks]
        try:
            for future in as_completed(waiting):
                yield from future.result()
        except BrokenProcessPool:
            raise EngineError("a worker process died") from None
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the processes, once they are done with what is in their hands."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """What a worker process keeps between jobs."""

    def __init__(self, config: RunConfig, arms: Sequence[Arm]) -> None:
        from reprieve.engine import load_pair
        from reprieve.evaluation.engines.local import LocalEngine
        from reprieve.settings import PromptSettings
        from reprieve.tasks import load_task
        from reprieve.tasks.asking import ask

        pair = load_pair(config.target, config.draft, dtype=config.dtype, device=config.device)
        self.config, self.arms = config, arms
        self.task = ask(load_task(config.task), pair.tokenizer, PromptSettings(**config.prompt))
        self.problems = self.task.problems(config.split, config.limit, offset=config.offset)
        self.engine = LocalEngine(pair)

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
