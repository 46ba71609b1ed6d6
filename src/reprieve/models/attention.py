"""Attention: masks for trees of tokens, grouped query heads, and the choice of kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from reprieve.transfers import to_device
from reprieve.types import ROOT

_lock = threading.Lock()
_num_without = 0  # forwards that currently exclude cuDNN
_enabled_before = True


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Exclude cuDNN's attention kernels, which the host needs milliseconds to start where shapes change."""
    global _num_without, _enabled_before
    if device.type != "cuda":
        yield
        return
    with _lock:  # the setting is global, and several threads can run forwards
        if not _num_without:
            _enabled_before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _num_without += 1
    try:
        yield
    finally:
        with _lock:
            _num_without -= 1
            if not _num_without:
                torch.backends.cuda.enable_cudnn_sdp(_enabled_before)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attend without copying keys and values for each query head: the heads of a group become more query rows.

    Args:
        query: [R, H, n, d].
        key, value: [R, G, columns, d], G a divisor of H.
        mask: [R, 1, n, columns], bool or additive.
        scale: of the products; None for 1 / sqrt(d).

    Returns:
        [R, H, n, d].
    """
    num, heads, size, dim = query.shape
    groups = key.shape[1]
    share = heads // groups
    folded = query.reshape(num, groups, share * size, dim)
    mask = mask.expand(num, share, size, -1).reshape(num, 1, share * size, -1)
    return F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale).reshape(query.shape)


def ancestor_matrix(parents: Sequence[int]) -> Tensor:
    """Return the [N + 1, N + 1] bool mask of a tree; row 0 is the last committed token, row i + 1 node i."""
    size = len(parents) + 1
    visible = torch.eye(size, dtype=torch.bool)
    visible[:, 0] = True
    for node, parent in enumerate(parents):
        if parent != ROOT:
            visible[node + 1] |= visible[parent + 1]
    return visible


def tree_mask(
    parents: Sequence[int], *, num_cached: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> Tensor:
    """Return the additive mask [1, 1, N + 1, num_cached + N + 1]: 0 where visible, the dtype's minimum elsewhere.

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
    return to_device(additive(visible, dtype)[None, None], device)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: 0 where a token is visible, the dtype's minimum elsewhere."""
    values = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return values.masked_fill_(~visible, torch.finfo(dtype).min)


def masks_by_layer(mask: Callable[[int | None], Tensor], windows: dict[str, int | None] | int | None) -> Any:
    """Return a mask for each kind of layer, as transformers takes them, from a function of the window size."""
    if isinstance(windows, dict):
        return {kind: mask(window) for kind, window in windows.items()}
    return mask(windows)


def layer_windows(model: PreTrainedModel) -> dict[str, int | None] | int | None:
    """Return sliding-window sizes: one for all layers (None for full attention), or one per kind of layer."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    by_kind = {kind: window if kind == "sliding_attention" else None for kind in kinds}
    if len(kinds) > 1:
        return by_kind
    return by_kind.popitem()[1] if kinds else window
