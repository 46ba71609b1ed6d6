"""Time of a single forward."""

from __future__ import annotations

import time

import torch

from reprieve.models.cached_model import CachedModel

_CACHED = 64  # cached tokens before it


@torch.inference_mode()
def forward_seconds(model: CachedModel, num_tokens: int, *, num_cached: int = _CACHED) -> float:
    """Return the seconds of a forward over some tokens; the tokens before them stay cached for the next call."""
    model.start([0] * num_cached, reuse_prefix=True)
    started = time.perf_counter()
    logits, _ = model.forward([0] * num_tokens)
    float(logits[-1, 0])  # on a GPU, wait for it
    seconds = time.perf_counter() - started
    model.keep(num_cached)
    return seconds
