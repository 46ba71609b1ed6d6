"""Several processes answer side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from reprieve.bench.engine import Job
from reprieve.bench.records import ProblemRecord
from reprieve.errors import EngineError

_CHUNK = 4


class WorkerPool:
    """Worker processes of one run; they are kept until `close`, so that later calls can reuse them.

    Args:
        start: called with `arguments` once in each process.
        answer: called there with a few jobs.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        start: Callable[..., None],
        arguments: tuple[Any, ...],
        answer: Callable[[Sequence[Job]], list[ProblemRecord]],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(num_workers, context, initializer=start, initargs=arguments)
        self._answer = answer

    def answer(self, jobs: Sequence[Job]) -> Iterator[ProblemRecord]:
        """Yield records as they complete, in no particular order. Ctrl-C drops the jobs in progress.

        Raises:
            EngineError: a worker died.
        """
        chunks = [jobs[at : at + _CHUNK] for at in range(0, len(jobs), _CHUNK)]
        waiting = [self._pool.submit(self._answer, chunk) for chunk in chunks]
        try:
            for future in as_completed(waiting):
                yield from future.result()
        except BrokenProcessPool:
            raise EngineError("a worker process died") from None
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Shut the pool down without waiting; each process ends after its current chunk."""
        self._pool.shutdown(wait=False, cancel_futures=True)
