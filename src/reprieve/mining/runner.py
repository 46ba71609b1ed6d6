"""Mine many problems, several in flight, into a store; used by one process and by a cluster's workers."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from reprieve.errors import EngineError, ReprieveError, require_whole
from reprieve.mining.records import ProblemLabels
from reprieve.mining.store import LabelStore
from reprieve.tasks import TaskProblem

Progress = Callable[[int, int], None]  # finished problems and their total


class Miner(Protocol):
    """Labels one problem; several calls can be in flight."""

    async def mine(self, problem: TaskProblem) -> ProblemLabels: ...


@dataclass
class MiningReport:
    """Result of one run."""

    num_mined: int = 0
    num_skipped: int = 0  # done before, or claimed by another worker
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
    store: LabelStore,
    *,
    num_in_flight: int = 16,
    progress: Progress = lambda done, total: None,
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
    try:
        asyncio.run(_mine_all(miner, list(problems), store, num_in_flight, progress, report))
    except KeyboardInterrupt:
        report.interrupted = True
    except EngineError as error:
        store.fold()
        raise EngineError(f"{error}; {len(store.done())} labelled problems are kept, run again to go on") from None
    except OSError as error:
        raise ReprieveError(f"label store {str(store.folder)!r} cannot be written: {error.strerror}") from error
    store.fold()
    return report


async def _mine_all(
    miner: Miner,
    problems: list[TaskProblem],
    store: LabelStore,
    num_in_flight: int,
    progress: Progress,
    report: MiningReport,
) -> None:
    elsewhere: list[TaskProblem] = []

    async def work(waiting: Iterator[TaskProblem]) -> None:
        for problem in waiting:
            if not await _mine_one(miner, problem, store, report):
                elsewhere.append(problem)
            progress(report.num_mined + report.num_skipped + len(report.errors), len(problems))

    async def work_all(waiting: list[TaskProblem]) -> None:
        shared = iter(waiting)
        await asyncio.gather(*(work(shared) for _ in range(min(num_in_flight, len(waiting)))))

    await work_all(problems)
    again, elsewhere = elsewhere, []
    await work_all(again)  # problems of workers that died since
    report.num_skipped += len(elsewhere)


async def _mine_one(miner: Miner, problem: TaskProblem, store: LabelStore, report: MiningReport) -> bool:
    """Mine one problem; return False if another worker has claimed it."""
    if problem.problem_id in store.done():
        report.num_skipped += 1
        return True
    with store.claim(problem.problem_id) as ours:
        if not ours:
            return False
        try:
            labels = await miner.mine(problem)
        except EngineError:  # mining cannot continue without it
            raise
        except Exception as error:  # other problems can still be mined
            report.errors[problem.problem_id] = f"{type(error).__name__}: {error}"
            print(f"{problem.problem_id}: {report.errors[problem.problem_id]}", file=sys.stderr)
            return True
        store.append(dataclasses.replace(labels, digest=problem.digest))
        report.num_mined += 1
        return True
