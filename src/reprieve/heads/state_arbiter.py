"""Arbiter with few weights: two logistic regressions on values that verification computes anyway."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from reprieve.heads.artefact import register_head
from reprieve.heads.base import Head, auc_text

NEUTRAL = 0.5  # the draft's side is as likely to end better as worse


def arbiter_risk(
    features: Tensor,  # [..., F]
    weight: Tensor,  # [2, F]: worse, better
    bias: Tensor,  # [2]
) -> Tensor:  # [...], 0 to 1
    """Return (1 + P(worse) - P(better)) / 2 for the draft's token; 1/2 if neither is more likely."""
    worse, better = torch.sigmoid(features @ weight.T + bias).unbind(-1)
    return (1 + worse - better) / 2


@register_head
class StateArbiter(Head):
    """Two linear heads: P(worse) and P(better), for the answer after the draft's token compared with the target's.

    Tensors: `weight` [2, F] and `bias` [2], with the standardisation of the features folded in.
    """

    kind: ClassVar[str] = "state_arbiter"
    purpose: ClassVar[str] = (
        "Weighs whether a drafted token leads to a better or a worse answer than the target's own, from states and "
        "distributions that both models have computed anyway. Reprieve takes the better side of a mismatch."
    )

    def facts(self) -> dict[str, str]:
        facts = super().facts()
        for name in ("worse", "better"):
            if name in self.training:
                facts[f"held-out ROC AUC, {name}"] = auc_text(self.training[name]["auc_held_out"])
        return facts

    def check_shapes(self) -> None:
        self._tensor("weight", 2, -1)
        self._tensor("bias", 2)

    @property
    def num_features(self) -> int:
        return int(self.tensors["weight"].shape[1])

    def probability(self, features: Tensor) -> Tensor:
        """Return the risk of `arbiter_risk` for features [..., F]: [...]."""
        return arbiter_risk(features, self.tensors["weight"], self.tensors["bias"])
