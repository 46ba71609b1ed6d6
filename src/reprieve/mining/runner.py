"""Mine many problems, several in flight, into a store."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from reprieve.errors import EngineError, ReprieveError, require_whole
from reprieve.mining.records import ProblemLabels
from reprieve.tasks import TaskProblem

Progress = Callable[[int, int], None]  # finished problems and their total


class Miner(Protocol):
    """Labels one problem; several calls can be in flight."""

    async def mine(self, problem: TaskProblem) -> ProblemLabels: ...


class Store(Protocol):
    """Destination of labels: a `LabelStore`, or a worker's connection to the process that has one."""

    def done(self) -> set[str]: ...

    def append(self, labels: ProblemLabels) -> None: ...


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
    store: Store,
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
        raise EngineError(f"{error}; {len(store.done())} labelled problems are kept, run again to go on") from None
    return report


async def _mine_all(
    miner: Miner,
    problems: list[TaskProblem],
    store: Store,
    num_in_flight: int,
    progress: Progress,
    report: MiningReport,
) -> None:
    waiting = [problem for problem in problems if problem.problem_id not in store.done()]
    report.num_skipped = len(problems) - len(waiting)
    shared = iter(waiting)

    async def work() -> None:
        for problem in shared:
            await _mine_one(miner, problem, store, report)
            progress(report.num_mined + report.num_skipped + len(report.errors), len(problems))

    await asyncio.gather(*(work() for _ in range(min(num_in_flight, len(waiting)))))


async def _mine_one(miner: Miner, problem: TaskProblem, store: Store, report: MiningReport) -> None:
    try:
        labels = await miner.mine(problem)
    except EngineError:  # the target is gone, so no problem can be mined
        raise
    except Exception as error:  # any error: the other problems can still be mined
        report.errors[problem.problem_id] = f"{type(error).__name__}: {error}"
        print(f"{problem.problem_id}: {report.errors[problem.problem_id]}", file=sys.stderr)
        return
    store.append(dataclasses.replace(labels, digest=problem.digest))
    report.num_mined += 1
