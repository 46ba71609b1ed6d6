"""Attention masks for a forward over a tree of tokens: each sees the committed text and its own ancestors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reprieve.transfers import to_device
from reprieve.types import ROOT


def ancestor_matrix(parents: Sequence[int]) -> Tensor:
    """[N + 1, N + 1] bool: whether row i may see row j; row 0 is the last committed token, row i + 1 node i."""
    size = len(parents) + 1
    visible = torch.eye(size, dtype=torch.bool)
    visible[:, 0] = True
    for node, parent in enumerate(parents):
        if parent != ROOT:
            visible[node + 1] |= visible[parent + 1]
    return visible


def tree_mask(
    parents: Sequence[int],
    *,
    num_cached: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> Tensor:
    """Additive mask [1, 1, N + 1, num_cached + N + 1]: 0 where visible, the dtype's minimum elsewhere.

    Args:
        window: sliding-window size: a token sees positions less than this far back; None for full attention.
    """
    ancestors = ancestor_matrix(parents)
    size = len(ancestors)
    visible = torch.cat([torch.ones(size, num_cached, dtype=torch.bool), ancestors], dim=1)
    if window is not None:
        depths = ancestors.sum(-1) - 1
        query = num_cached + depths
        key = torch.cat([torch.arange(num_cached), query])
        visible &= query[:, None] - key[None, :] < window
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return to_device(mask[None, None], device)
