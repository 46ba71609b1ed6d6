"""Random acceptance: FSD's ablation, the control that an informed rule has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reprieve.errors import require_range
from reprieve.rules.base import Dial, Rule, Traits, register_rule
from reprieve.types import Evidence, Need


@register_rule
@dataclass(frozen=True)
class RandomRule(Rule):
    """Accept each drafted token with probability `rate`, independent of the models (FSD, appendix D).

    FSD's ablation: the control that an informed rule has to beat. It replaces the lossless check; after a refusal the
    next token is sampled from the target's distribution.

    Relaxed: no bound on the output distribution.
    """

    name = "random"
    own_dial = Dial("rate", strictest=0.0, stops=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
    own_traits = Traits(needs=frozenset({Need.NOISE}), replaces=True)
    origin = "FSD's ablation, appendix D"

    rate: float = 0.5

    def __post_init__(self) -> None:
        require_range("rate", self.rate, 0.0, 1.0)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return 1 - noise, in (0, 1], so that rate 0 accepts nothing and rate 1 everything."""
        assert evidence.noise is not None, "the engine draws noise for rules that need it"
        return 1.0 - evidence.noise
