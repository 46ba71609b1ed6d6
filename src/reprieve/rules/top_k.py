"""Top-k: the baseline of AutoJudge and Judge Decoding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reprieve.rules.base import Rule, require_k
from reprieve.rules.distributions import token_rank
from reprieve.types import Evidence


@dataclass(frozen=True)
class TopKRule(Rule):
    """Accept a drafted token among the target's k most likely (AutoJudge, arXiv 2504.20039, section 4.1).

    Relaxed: no bound on how improbable the k-th token is. k = 1 is greedy matching.
    """

    name = "top_k"
    dial = "k"
    strictest = 1
    truncates = True

    k: int = 2

    def __post_init__(self) -> None:
        require_k("k", self.k)

    @property
    def threshold(self) -> float:
        # Rank 1 is the lossless greedy choice; when sampling it would still be a relaxation, so k = 1 rescues none.
        return float(self.k) if self.k > 1 else 0.0

    def risk(self, evidence: Evidence) -> Tensor:
        """Rank under the target, 1 for the most likely."""
        return token_rank(evidence.scores, evidence.token_ids).float()
