"""Interface that a run needs from an engine, and the facts that an engine reports about itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from reprieve.bench.arms import Arm
from reprieve.bench.records import ProblemRecord
from reprieve.heads.binding import PairIdentity
from reprieve.settings import NumDraftTokens
from reprieve.tasks import Task, TaskProblem

if TYPE_CHECKING:
    from reprieve.bench.config import RunConfig


@dataclass(frozen=True)
class EngineFacts:
    """Kind, version and device of the engine that decodes.

    Args:
        engine: local or vllm; openai for a server that does not say what it is.
        engine_version, runner: a server's release and model runner; None where there is none, or it is not known.
        engine_arguments: further flags that the server was started with.
        device: device that it runs on, if known.
    """

    identity: PairIdentity
    dtype: str
    device: str
    engine: str = "local"
    engine_version: str | None = None
    runner: str | None = None
    engine_arguments: str = ""


@dataclass(frozen=True)
class Job:
    """One answer to be made: the arm's label, the problem's number in the run, and the trial."""

    arm: str
    number: int
    trial: int


class Engine(Protocol):
    """Engine that answers a run's problems. Callers do not depend on its kind."""

    tokenizer: Any
    num_parallel: int  # answers in progress at once; above 1, the time of a single answer means little
    num_positions: int | None  # tokens of a text that it can read, as far as is known

    @property
    def facts(self) -> EngineFacts:
        """Kind, version and device of this engine."""
        ...

    def fingerprints(self, drafter: str) -> dict[str, str]:
        """Fingerprints of a drafter's own weights, by name."""
        ...

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        """Draft length of an arm, as certificates record it: K, `auto`, or `auto:` and a head."""
        ...

    def refusal(self, arm: Arm, drafter: str) -> str:
        """Return the reason why the engine cannot run this arm; empty if it can."""
        ...

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """Prepare for these arms, in addition to those of earlier calls."""
        ...

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
