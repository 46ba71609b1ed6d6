"""PAD's rule: rescue tokens that an MLP on the target's state, entropy and probability does not call pivots."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import require_range
from reprieve.rules.base import Dial, register_rule
from reprieve.rules.learned import LearnedRule
from reprieve.types import Evidence, gather_token


@register_rule
@dataclass(frozen=True)
class PivotRule(LearnedRule):
    """Rescue tokens that an MLP does not call pivots (PAD, section 3.3); `threshold` is the paper's sigma.

    Args:
        floor: smallest target probability of a rescued token.
    """

    name = "pivot"
    own_dial = Dial("threshold", strictest=0.0, stops=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
    head_kind = "pivot"
    made_by = "reprieve train pivot"
    origin = 'PAD, "Reject Only Critical Tokens: Pivot-Aware Speculative Decoding"'

    floor: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("floor", self.floor, 0.0, 1.0)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return P(pivot), [...]; infinite below the floor."""
        probs = gather_token(evidence.target_logits.log_softmax(-1), evidence.token_ids).exp()
        return torch.where(probs < self.floor, math.inf, super().risk(evidence))
