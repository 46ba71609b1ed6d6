"""Typical acceptance, from Medusa (arXiv 2401.10774)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from reprieve.errors import SpecError, require_range
from reprieve.rules.base import Dial, Rule, register_rule
from reprieve.rules.distributions import entropy
from reprieve.types import Evidence


@register_rule
@dataclass(frozen=True)
class TypicalRule(Rule):
    """Accept a token whose target probability exceeds min(epsilon, delta * exp(-entropy)).

    Args:
        epsilon: hard probability bar, in (0, 1]; Medusa's code uses 0.09.
        delta: entropy-dependent bar, above 0; the square root of epsilon (Medusa's recommendation) when None.
        slack: nats below the bar that still pass; 0 is Medusa's rule, -inf is lossless.

    Relaxed: no bound on the output distribution.
    """

    name = "typical"
    own_dial = Dial("slack", strictest=-math.inf, stops=(-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0))
    truncates = True
    origin = "Medusa 2401.10774"

    epsilon: float = 0.09
    delta: float | None = None
    slack: float = 0.0

    def __post_init__(self) -> None:
        require_range("epsilon", self.epsilon, 0.0, 1.0, low_open=True)
        if self.delta is not None and not self.delta > 0:
            raise SpecError(f"delta must be above 0, got {self.delta!r}")
        require_range("slack", self.slack, -math.inf, math.inf)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the nats by which the token's target probability is below the bar, [...]; negative above it."""
        delta = math.sqrt(self.epsilon) if self.delta is None else self.delta
        log_bar = (math.log(delta) - entropy(evidence.target_probs)).clamp_max(math.log(self.epsilon))
        return log_bar - evidence.token_log_probs
