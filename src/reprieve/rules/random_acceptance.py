"""Random acceptance: FSD's ablation, the floor any informed rule has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reprieve.rules.base import Rule, require_probability
from reprieve.types import Evidence


@dataclass(frozen=True)
class RandomRule(Rule):
    """Accept each drafted token with probability `rate`, whatever the models say (FSD, appendix D).

    Replaces the lossless check; after a refusal the target's distribution is sampled.
    """

    name = "random"
    dial = "rate"
    strictest = 0.0
    replaces = True
    needs = frozenset({"noise"})

    rate: float = 0.5

    def __post_init__(self) -> None:
        require_probability("rate", self.rate)

    @property
    def threshold(self) -> float:
        return self.rate

    def risk(self, evidence: Evidence) -> Tensor:
        """1 - noise, in (0, 1], so that rate 0 accepts nothing and rate 1 everything."""
        assert evidence.noise is not None, "the engine draws noise for rules that need it"
        return 1.0 - evidence.noise
