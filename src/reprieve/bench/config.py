"""Configuration of a run: stored in the run's folder, and compared when the run is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from reprieve.bench.arms import Arm
from reprieve.bench.engine import Engine
from reprieve.bench.settings import RunSettings
from reprieve.errors import SpecError
from reprieve.heads.certificates import Conditions
from reprieve.settings import AUTO, NumDraftTokens


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run measures; kept in its folder and compared when it is resumed."""

    command: str
    target: str
    draft: str | None
    drafter: str
    dtype: str
    device: str
    weights: str
    task: str
    split: str
    limit: int
    seed: int
    sampling: dict[str, Any]
    num_draft_tokens: list[NumDraftTokens]
    arms: list[str]
    heads: dict[str, str] = field(default_factory=dict)  # fingerprints, by name
    offset: int = 0
    num_trials: int = 1
    prompt: dict[str, Any] = field(default_factory=dict)  # how problems are put to the model
    engine: str = "local"
    engine_version: str | None = None
    runner: str | None = None
    engine_arguments: str = ""

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
        facts = dict(vars(engine.facts))
        pair = facts.pop("identity")
        return cls(
            command=command,
            target=pair.target,
            draft=pair.draft,
            weights=f"{pair.target_weights}+{pair.draft_weights}",
            num_draft_tokens=list(dict.fromkeys(arm.num_draft_tokens for arm in arms if arm.rule is not None)),
            arms=[arm.label for arm in arms],
            heads=_fingerprints(engine, arms, settings.drafter),
            **facts,
            **asdict(settings),
        )

    def conditions(self, engine: Engine, arm: Arm) -> Conditions:
        """Return the conditions under which a certificate of this arm is valid."""
        return Conditions(
            pair=engine.facts.identity,
            task=self.task,
            sampling=self.sampling,
            num_draft_tokens=engine.draft_tokens(arm, self.drafter),
            drafter=arm.drafter or self.drafter,
            dtype=self.dtype,
            engine=self.engine,
            engine_version=self.engine_version,
            runner=self.runner,
            engine_arguments=self.engine_arguments,
            **self.prompt,
        )


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
