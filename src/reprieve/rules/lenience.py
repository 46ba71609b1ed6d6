"""Lenience, from the appendix of speculative decoding (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from reprieve.errors import require_range
from reprieve.rules.base import Dial, Rule, register_rule
from reprieve.rules.margin import margin_risk
from reprieve.types import Evidence


@register_rule
@dataclass(frozen=True)
class LenienceRule(Rule):
    """Accept with probability min(1, target / (lenience * draft)); greedy: p(token) >= lenience * p(best).

    Args:
        lenience: in (0, 1]; 1 is lossless.

    Relaxed: a token's output probability is at most 1 / lenience times its target probability.
    A rejected token is replaced from the lossless residual.
    """

    name = "lenience"
    own_dial = Dial("lenience", strictest=1.0, stops=(1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01))
    origin = "Leviathan et al. 2211.17192, appendix"

    lenience: float = 0.5

    def __post_init__(self) -> None:
        require_range("lenience", self.lenience, 0.0, 1.0, low_open=True)

    @property
    def threshold(self) -> float:
        return -math.log(self.lenience) if self.lenience < 1.0 else -math.inf

    def risk(self, evidence: Evidence) -> Tensor:
        """Return log(uniform * draft / target) when sampling, log(p(best) / p(token)) when greedy; nats, [...]."""
        if evidence.uniforms is None:
            return margin_risk(evidence.scores, evidence.token_ids)
        proposed = evidence.uniforms if evidence.proposal_probs is None else evidence.uniforms * evidence.proposal_probs
        return proposed.log() - evidence.token_log_probs
