"""Mine many problems into a store, several in flight, in this process or in several."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from reprieve.engine.pair import start_worker
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
        raise EngineError(f"{error}; {len(store.done())} labelled problems are kept, run again to resume") from None
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
    settings: MiningSettings,
    problems: Sequence[TaskProblem],
    store: LabelStore,
    *,
    num_workers: int,
    progress: Progress = no_progress,
) -> MiningReport:
    """Mine the problems that the store does not have in several local processes.

    Each process has its own copy of the pair and one CPU thread.

    Raises:
        ReprieveError: a worker process died; labels written so far are kept.
    """
    waiting = [problem.problem_id for problem in problems if problem.problem_id not in store.done()]
    total = MiningReport(num_skipped=len(problems) - len(waiting))
    context = multiprocessing.get_context("spawn")
    workers, open_connections = [], set()
    for number in range(min(num_workers, len(waiting))):
        own_end, worker_end = context.Pipe()
        shared = frozenset(waiting[number::num_workers])
        workers.append(context.Process(target=_run, args=(worker_end, settings, shared), daemon=True))
        workers[-1].start()
        worker_end.close()  # so that the pipe closes when the worker exits
        open_connections.add(own_end)
    try:
        progress(total.num_skipped, len(problems))
        while open_connections:
            ready = wait(list(open_connections))
            for connection in [one for one in open_connections if one in ready]:
                message = connection.recv()
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, ProblemLabels):
                    store.append(message)
                    total.num_mined += 1
                else:
                    open_connections.discard(connection)
                    total.errors.update(message.errors)
                progress(total.num_mined + total.num_skipped + len(total.errors), len(problems))
    except EOFError:
        raise ReprieveError("a worker process died; labels mined so far are kept, run again to resume") from None
    except KeyboardInterrupt:
        total.interrupted = True
    finally:
        for worker in workers:
            worker.terminate()
    return total


class _ParentStore:
    """Stands for the parent's store in a worker, which gets only problems that it does not have."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def done(self) -> set[str]:
        return set()

    def append(self, labels: ProblemLabels) -> None:
        self._connection.send(labels)


def _run(connection: Connection, settings: MiningSettings, problem_ids: Set[str]) -> None:
    """In a worker process: mine these problems; sends their labels, then the report, or what ended it."""
    start_worker()
    try:
        job = build(settings)
        problems = [problem for problem in job.problems if problem.problem_id in problem_ids]
        connection.send(mine_problems(job.miner, problems, _ParentStore(connection), num_in_flight=settings.in_flight))
    except Exception as error:
        known = isinstance(error, ReprieveError)
        connection.send(error if known else ReprieveError(f"{type(error).__name__}: {error}"))
