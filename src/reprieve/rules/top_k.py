"""Top-k: the baseline of AutoJudge and Judge Decoding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reprieve.errors import require_counts
from reprieve.rules.base import Dial, Rule, register_rule
from reprieve.rules.distributions import token_rank
from reprieve.types import Evidence


@register_rule
@dataclass(frozen=True)
class TopKRule(Rule):
    """Accept a drafted token among the target's k most likely (AutoJudge, arXiv 2504.20039, section 4.1).

    Relaxed: no bound on how improbable the k-th token is. k = 1 is greedy matching.
    """

    name = "top_k"
    own_dial = Dial("k", strictest=1, stops=(1, 2, 3, 4, 6, 8, 16, 32, 64))
    truncates = True
    origin = "baseline of Judge Decoding 2501.19309 and AutoJudge 2504.20039 (section 4.1)"

    k: int = 2

    def __post_init__(self) -> None:
        require_counts(self, "k")

    @property
    def threshold(self) -> float:
        # Rank 1 is the greedy choice. When sampling, accepting it would be a relaxation, so k = 1 rescues nothing.
        return float(self.k) if self.k > 1 else 0.0

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the rank under the target, [...]; 1 for the most likely."""
        return token_rank(evidence.scores, evidence.token_ids).float()
