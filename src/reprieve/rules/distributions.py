"""Pure functions on next-token distributions, shared by rules: [..., V] in, [...] out."""

from __future__ import annotations

import torch
from torch import Tensor

from reprieve.types import gather_token


def entropy(probs: Tensor) -> Tensor:
    """Shannon entropy in nats."""
    return -torch.xlogy(probs, probs).sum(-1)


def kl_divergence(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) in nats; +inf where `right` excludes a token that `left` does not."""
    return (torch.xlogy(left, left) - torch.xlogy(left, right)).sum(-1)


def js_divergence(left: Tensor, right: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats, 0 to ln 2."""
    middle = (left + right) / 2
    # Rounding can give a tiny negative value for equal distributions.
    return ((kl_divergence(left, middle) + kl_divergence(right, middle)) / 2).clamp_min(0)


def total_variation(left: Tensor, right: Tensor) -> Tensor:
    """Total variation distance, 0 to 1."""
    return (left - right).abs().sum(-1) / 2


def token_rank(values: Tensor, token_ids: Tensor) -> Tensor:
    """Return the rank of each token, 1 for the largest value; ties share the better rank: [..., V], [...] to [...]."""
    return (values > gather_token(values, token_ids).unsqueeze(-1)).sum(-1) + 1
