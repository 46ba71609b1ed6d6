"""Engine of a run: its interface, the facts that it reports about itself, and the run's configuration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from reprieve.bench.arms import Arm
from reprieve.bench.records import ProblemRecord
from reprieve.bench.settings import RunSettings
from reprieve.errors import SpecError
from reprieve.heads.certificates import Conditions
from reprieve.heads.loading import require_heads_fit
from reprieve.identity import EngineIdentity, PairIdentity
from reprieve.settings import AUTO, NumDraftTokens
from reprieve.tasks import Task, TaskProblem


@dataclass(frozen=True, kw_only=True)
class EngineFacts(EngineIdentity):
    """An engine, its pair, and the device that it runs on, if known."""

    pair: PairIdentity
    device: str


@dataclass(frozen=True)
class Job:
    """One answer to be made: the arm's label, the problem's number in the run, and the trial."""

    arm: str
    number: int
    trial: int


class Engine(ABC):
    """Engine that answers a run's problems. Callers do not depend on its kind."""

    tokenizer: Any
    num_parallel: int  # answers in progress at once; above 1, the time of a single answer means little
    num_positions: int | None  # tokens of a text that it can read, as far as is known

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """Kind, version and device of this engine."""

    @abstractmethod
    def fingerprints(self, drafter: str) -> dict[str, str]:
        """Fingerprints of a drafter's own weights, by name."""

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        """Draft length of an arm, as certificates record it: K, `auto`, or `auto:` and a head."""
        return arm.num_draft_tokens

    @abstractmethod
    def refusal(self, arm: Arm, drafter: str) -> str:
        """Return the reason why the engine cannot run this arm; empty if it can."""

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """Prepare for these arms, in addition to those of earlier calls."""
        return

    @abstractmethod
    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """Yield records as they complete, in any order; Ctrl-C drops the answers in progress.

        Raises:
            PairError: a head made for another pair.
            ReprieveError: a process or server died.
        """

    def close(self) -> None:
        """End what it started."""
        return


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunSettings, EngineIdentity):
    """Everything that decides what a run measures; kept in its folder and compared when it is resumed."""

    command: str
    target: str
    draft: str | None
    device: str
    weights: str
    num_draft_tokens: list[NumDraftTokens]
    arms: list[str]
    heads: dict[str, str] = field(default_factory=dict)  # fingerprints, by name

    @classmethod
    def of(cls, engine: Engine, arms: Sequence[Arm], settings: RunSettings, *, command: str = "") -> RunConfig:
        """The configuration of a run of these arms on this engine.

        Raises:
            SpecError: an arm that the engine cannot decode.
        """
        for arm in arms:
            if reason := engine.refusal(arm, settings.drafter):
                raise SpecError(f"arm {arm.label} cannot be measured here: {reason}")
        engine.expect(arms, settings.drafter)
        facts, pair = engine.facts, engine.facts.pair
        return cls(
            command=command,
            target=pair.target,
            draft=pair.draft,
            device=facts.device,
            weights=f"{pair.target_weights}+{pair.draft_weights}",
            num_draft_tokens=list(dict.fromkeys(arm.num_draft_tokens for arm in arms if arm.rule is not None)),
            arms=[arm.label for arm in arms],
            heads=_fingerprints(engine, arms, settings.drafter),
            **facts.engine_identity,
            **vars(settings),
        )

    def conditions(self, engine: Engine, arm: Arm) -> Conditions:
        """Return the conditions under which a certificate of this arm is valid."""
        drafter = arm.drafter or self.drafter
        return Conditions(
            pair=engine.facts.pair,
            task=self.task,
            prompt=self.prompt,
            sampling=self.sampling,
            num_draft_tokens=engine.draft_tokens(arm, self.drafter),
            drafter=drafter,
            drafter_weights="+".join(engine.fingerprints(drafter).values()) or None,
            **self.engine_identity,
        )

    def require_arm_fits(self, engine: Engine, arm: Arm) -> None:
        """Check the heads of an arm's rule against the pair and the task.

        Raises:
            PairError: a head of another pair.
        """
        if arm.rule is not None and arm.rule.heads:
            conditions = self.conditions(engine, arm)
            drafter = conditions.drafter.partition(":")[0]
            here = arm.unchecked(conditions)
            require_heads_fit(arm.rule, conditions.pair, self.task, drafter=drafter, here=here)


def _fingerprints(engine: Engine, arms: Sequence[Arm], drafter: str) -> dict[str, str]:
    """Of every trained part that is not the pair's own, by name."""
    by_head: dict[str, str] = {}
    for arm in arms:
        if arm.rule is not None:
            by_head |= {name: head.fingerprint for name, head in arm.rule.heads}
            by_head |= engine.fingerprints(arm.drafter or drafter)
            if isinstance(decides := engine.draft_tokens(arm, drafter), str) and decides != AUTO:
                by_head[f"length of {arm.label}"] = decides
    return by_head
