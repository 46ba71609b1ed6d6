"""Interface that a run needs from an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reprieve.bench.arms import Arm
from reprieve.bench.config import RunConfig
from reprieve.bench.engine_facts import Described
from reprieve.bench.records import ProblemRecord
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.tasks import Task, TaskProblem


@dataclass(frozen=True)
class Job:
    """One answer to be made: the arm's label, the problem's number in the run, and the trial."""

    arm: str
    number: int
    trial: int


class Engine(Described, Protocol):
    """Engine that answers a run's problems. Callers do not depend on its kind."""

    tokenizer: Any
    num_parallel: int  # answers in progress at once; above 1, the time of a single answer means little
    num_positions: int | None  # tokens of a text that it can read, as far as is known

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """Yield records as they complete, in any order; Ctrl-C drops the answers in progress.

        Raises:
            PairError: a head made for another pair.
            ReprieveError: a process or server died.
        """
        ...

    def close(self) -> None:
        """End what it started."""
        ...


def without_missing(arms: Sequence[Arm], engine: Engine, drafter: str) -> list[Arm]:
    """Return the arms, except target or draft alone if the engine cannot run it: a comparison can omit these."""
    return [arm for arm in arms if arm.label not in (TARGET_ONLY, DRAFT_ONLY) or not engine.refusal(arm, drafter)]
