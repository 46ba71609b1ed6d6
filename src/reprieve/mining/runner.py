"""Mine many problems into a store, several in flight, in this process or in several."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from reprieve.engine.processes import start_worker
from reprieve.errors import EngineError, ReprieveError, require_whole
from reprieve.mining.building import Miner, build
from reprieve.mining.settings import MiningSettings
from reprieve.mining.store import LabelStore, ProblemLabels
from reprieve.tasks import TaskProblem
from reprieve.types import Progress, no_progress


@dataclass
class MiningReport:
    """Result of one run."""

    num_mined: int = 0
    num_skipped: int = 0  # in the store already
    errors: dict[str, str] = field(default_factory=dict)  # by problem id; a rerun retries them
    interrupted: bool = False

    def require_some(self) -> None:
        """Refuse a run in which every problem failed.

        Raises:
            ReprieveError: with the first error.
        """
        if self.errors and not self.num_mined and not self.num_skipped:
            problem_id, first = next(iter(self.errors.items()))
            raise ReprieveError(f"every problem failed; the first, {problem_id}: {first}")


def mine_problems(
    miner: Miner,
    problems: Iterable[TaskProblem],
    store: LabelStore | _ParentStore,
    *,
    num_in_flight: int = 16,
    progress: Progress = no_progress,
) -> MiningReport:
    """Mine the problems that the store does not have.

    Ctrl-C drops the problems in flight and keeps the finished ones. A problem that fails is reported, not labelled.

    Raises:
        SpecError: fewer than 1 problem in flight.
        EngineError: a server died.
        ReprieveError: the store cannot be read or written.
    """
    require_whole("num_in_flight", num_in_flight, 1)
    report = MiningReport()
    problems = list(problems)
    waiting = [problem for problem in problems if problem.problem_id not in store.done()]
    report.num_skipped = len(problems) - len(waiting)
    shared = iter(waiting)
    if waiting:
        progress(report.num_skipped, len(problems))

    async def work() -> None:
        for problem in shared:
            await _mine_one(miner, problem, store, report)
            progress(report.num_mined + report.num_skipped + len(report.errors), len(problems))

    async def mine_all() -> None:
        await asyncio.gather(*(work() for _ in range(min(num_in_flight, len(waiting)))))

    try:
        asyncio.run(mine_all())
    except KeyboardInterrupt:
        report.interrupted = True
    except EngineError as error:
        raise EngineError(f"{error}; {len(store.done())} labelled problems are kept, run again to go on") from None
    return report


async def _mine_one(miner: Miner, problem: TaskProblem, store: LabelStore | _ParentStore, report: MiningReport) -> None:
    started = time.perf_counter()
    try:
        labels = await miner.mine(problem)
    except EngineError:  # the target is gone, so no problem can be mined
        raise
    except Exception as error:  # any error: the other problems can still be mined
        report.errors[problem.problem_id] = f"{type(error).__name__}: {error}"
        print(f"{problem.problem_id}: {report.errors[problem.problem_id]}", file=sys.stderr)
        return
    store.append(dataclasses.replace(labels, digest=problem.digest, seconds=time.perf_counter() - started))
    report.num_mined += 1


def mine_in_processes(
    settings: MiningSettings, folder: Path, *, num_workers: int, progress: Progress = no_progress
) -> MiningReport:
    """Mine in several local processes, each with its own copy of the pair and one CPU thread.

    Raises:
        ReprieveError: a worker process died; labels written so far are kept.
    """
    context = multiprocessing.get_context("spawn")
    connections, workers, total = [], [], MiningReport()
    for number in range(num_workers):
        own_end, worker_end = context.Pipe()
        workers.append(context.Process(target=_run, args=(worker_end, settings, number, num_workers), daemon=True))
        workers[-1].start()
        worker_end.close()  # so that the pipe closes when the worker exits
        connections.append(own_end)
    try:
        for connection in connections:
            manifest, problem_ids = _receive(connection)
            store = LabelStore(folder, manifest)
            connection.send(store.done())
        total.num_skipped = len(store.done() & problem_ids)
        progress(total.num_skipped, len(problem_ids))
        open_connections = set(connections)
        while open_connections:
            ready = wait(list(open_connections))
            for connection in [one for one in open_connections if one in ready]:
                message = _receive(connection)
                if isinstance(message, ProblemLabels):
                    store.append(message)
                    total.num_mined += 1
                else:
                    open_connections.discard(connection)
                    total.errors.update(message.errors)
                progress(total.num_mined + total.num_skipped + len(total.errors), len(problem_ids))
    except EOFError:
        raise ReprieveError("a worker process died; labels mined so far are kept, run again to go on") from None
    except KeyboardInterrupt:
        total.interrupted = True
    finally:
        for worker in workers:
            worker.terminate()
    return total


def _receive(connection: Connection) -> Any:
    """Return a worker's next message: manifest and problem ids, then labels, then its report; raise what ended it."""
    message = connection.recv()
    if isinstance(message, Exception):
        raise message
    return message


class _ParentStore:
    """Stands for the parent's store in a worker."""

    def __init__(self, connection: Connection, done: set[str]) -> None:
        self._connection = connection
        self._done = done

    def done(self) -> set[str]:
        return self._done

    def append(self, labels: ProblemLabels) -> None:
        self._connection.send(labels)
        self._done.add(labels.problem_id)


def _run(connection: Connection, settings: MiningSettings, number: int, num_workers: int) -> None:
    """In a worker process: mine every `num_workers`th problem."""
    start_worker()
    try:
        workbench = build(settings)
        connection.send((workbench.manifest, {problem.problem_id for problem in workbench.problems}))
        store = _ParentStore(connection, connection.recv())
        problems = workbench.problems[number::num_workers]
        connection.send(mine_problems(workbench.miner, problems, store, num_in_flight=settings.in_flight))
    except Exception as error:
        known = isinstance(error, ReprieveError)
        connection.send(error if known else ReprieveError(f"{type(error).__name__}: {error}"))
