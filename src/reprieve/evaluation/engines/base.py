"""What a run asks of an engine, and what it must know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.evaluation.arms import Arm
from reprieve.evaluation.records import ProblemRecord
from reprieve.heads.binding import PairIdentity
from reprieve.tasks import Task, TaskProblem

if TYPE_CHECKING:
    from reprieve.evaluation.config import RunConfig


@dataclass(frozen=True)
class Job:
    """One answer to be made: the arm's label, the problem's place in the run, and the trial."""

    arm: str
    number: int
    trial: int


@dataclass(frozen=True)
class EngineFacts:
    """What decodes: part of every run's configuration and of every certificate.

    Args:
        engine: local or vllm; openai for a server that does not say what it is.
        engine_version, runner: a server's release and model runner; None where there is none, or it is not known.
        device: where it runs, as far as is known.
    """

    identity: PairIdentity
    dtype: str
    device: str
    engine: str = "local"
    engine_version: str | None = None
    runner: str | None = None


class Engine(Protocol):
    """Answers the problems of runs. Nothing above it knows which one it is."""

    tokenizer: Any
    num_parallel: int  # answers under way at once; how long one takes says little where it is more than one
    meter: str | None  # what measures energy

    @property
    def facts(self) -> EngineFacts:
        """What decodes."""
        ...

    def fingerprints(self, drafter: str) -> dict[str, str]:
        """Of the weights that a drafter brings with it, by name."""
        ...

    def refusal(self, arm: Arm, drafter: str) -> str:
        """Why it cannot decode as this arm does; empty where it can."""
        ...

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """Be ready for these arms, beside those of before."""
        ...

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """Records as they come, in any order; Ctrl-C drops what is under way.

        Raises:
            PairError: a head made for another pair.
            ReprieveError: a process or server died.
        """
        ...

    def close(self) -> None:
        """End what it started."""
        ...


def without_missing(arms: Sequence[Arm], engine: Engine, drafter: str) -> list[Arm]:
    """The arms, but for target or draft alone where the engine has not got them: a comparison can do without."""
    return [arm for arm in arms if arm.label not in (TARGET_ONLY, DRAFT_ONLY) or not engine.refusal(arm, drafter)]
