"""ASD (arXiv 2608.03447): logit regret with a limit per block and a budget per answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from reprieve.errors import require_counts, require_range
from reprieve.rules.base import Dial, RescueLimits, Rule, register_rule
from reprieve.rules.margin import margin_risk
from reprieve.types import Evidence


@register_rule
@dataclass(frozen=True)
class AsdRule(Rule):
    """Rescue tokens of small regret until the answer's budget is spent.

    Bounds the whole answer: under greedy decoding, the summed log-probability of its tokens is at most `budget` below
    that of the target's first choices at the same positions.

    Args:
        regret: largest logit gap between the target's best token and a rescued one, nats, 0 or more.
        per_block: maximum number of rescues per round; None for no limit.
        budget: largest summed regret of an answer, nats; 0 is lossless, inf means no limit.
    """

    name = "asd"
    own_dial = Dial("budget", strictest=0.0, stops=(0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0))
    origin = "ASD 2608.03447"

    regret: float = 0.25
    per_block: int | None = 2
    budget: float = 4.0

    def __post_init__(self) -> None:
        require_range("regret", self.regret, 0.0, math.inf)
        require_range("budget", self.budget, 0.0, math.inf)
        require_counts(self, "per_block")

    @property
    def threshold(self) -> float:
        return self.regret if self.regret > 0 and self.budget > 0 else -1.0

    @property
    def leniency(self) -> float:
        """Budget, the parameter that the dial sets."""
        return self.budget

    @property
    def limits(self) -> RescueLimits:
        # Also without a limit of its own: other requests of a batch may have set one.
        return RescueLimits(self.per_block, None if math.isinf(self.budget) else self.budget)

    def risk(self, evidence: Evidence) -> Tensor:
        """Logit of the target's best token minus the drafted token's, nats."""
        return margin_risk(evidence.scores, evidence.token_ids)
