"""Head of AutoJudge and Judge Decoding: logistic regression on existing hidden states."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from reprieve.heads.artefact import register_head
from reprieve.heads.base import Head


def judge_probability(
    features: Tensor,  # [..., F]
    weight: Tensor,  # [F]
    bias: Tensor,  # []
) -> Tensor:  # [...], 0 to 1
    """Return P(important) of drafted tokens (AutoJudge, section 3.2); standardisation is folded into the weights."""
    return torch.sigmoid(features @ weight + bias)


@register_head
class JudgeHead(Head):
    """Linear head: one product with states that the target has computed anyway.

    Tensors: `weight` [F] and `bias` [], with the standardisation of the features folded in.
    """

    kind: ClassVar[str] = "judge"
    purpose: ClassVar[str] = (
        "Predicts which drafted tokens would change the answer, with a linear head on hidden states that the target "
        "computes anyway (AutoJudge). Reprieve rescues the others."
    )

    def check_shapes(self) -> None:
        self._tensor("weight", -1)
        self._tensor("bias")

    @property
    def num_features(self) -> int:
        return int(self.tensors["weight"].shape[0])

    def probability(self, features: Tensor) -> Tensor:
        """Return P(important) for features [..., F]: [...]."""
        return judge_probability(features, self.tensors["weight"], self.tensors["bias"])
