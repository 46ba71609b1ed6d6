"""PAD's head: a two-branch MLP on the target's hidden state, entropy and probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from reprieve.errors import SpecError
from reprieve.heads.artefact import register_head
from reprieve.heads.base import Head

LAYERS = ("hidden", "scalars", "fuse", "out")


def pivot_logits(
    features: Tensor,  # [..., F]: hidden states, then entropy and probability
    tensors: Mapping[str, Tensor],
) -> Tensor:  # [..., 2]: non-pivot, pivot
    """Return the two logits of PAD's classifier (PAD, appendix B).

    u = relu(hidden), v = relu(scalars), z = out(relu(fuse(u concat v))); features are standardised first.
    """
    standard = (features - tensors["mean"]) / tensors["scale"]
    size = tensors["hidden.weight"].shape[1]
    u = relu(linear(standard[..., :size], tensors["hidden.weight"], tensors["hidden.bias"]))
    v = relu(linear(standard[..., size:], tensors["scalars.weight"], tensors["scalars.bias"]))
    fused = relu(linear(torch.cat([u, v], dim=-1), tensors["fuse.weight"], tensors["fuse.bias"]))
    return linear(fused, tensors["out.weight"], tensors["out.bias"])


@register_head
class PivotHead(Head):
    """Small MLP. Tensors: `mean` and `scale` [F], and weight and bias of `hidden`, `scalars`, `fuse` and `out`."""

    kind: ClassVar[str] = "pivot"
    purpose: ClassVar[str] = (
        "Predicts pivots, which are drafted tokens after which fewer continuations are correct, from the target's "
        "state, entropy and probability (PAD). Reprieve rescues the others."
    )

    def check_shapes(self) -> None:
        if self.recipe.num_scalars != 2:
            raise SpecError("the pivot head reads entropy and probability; its recipe must have both")
        hidden, scalars = self._tensor("hidden.weight", -1, -1), self._tensor("scalars.weight", -1, 2)
        fuse = self._tensor("fuse.weight", -1, hidden.shape[0] + scalars.shape[0])
        self._tensor("out.weight", 2, fuse.shape[0])
        for name in ("mean", "scale"):
            self._tensor(name, hidden.shape[1] + 2)
        for layer in LAYERS:
            self._tensor(f"{layer}.bias", self._tensor(f"{layer}.weight", -1, -1).shape[0])

    @property
    def num_features(self) -> int:
        return int(self.tensors["mean"].shape[0])

    def probability(self, features: Tensor) -> Tensor:
        """Return P(pivot), the softmax of `pivot_logits`: [..., F] to [...]."""
        return pivot_logits(features, self.tensors).softmax(-1)[..., 1]
