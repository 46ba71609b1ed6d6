"""What a forward takes, timed alone."""

from __future__ import annotations

import time

import torch

from reprieve.models.cached_model import CachedModel

_CACHED = 64  # tokens before it


@torch.inference_mode()
def forward_seconds(model: CachedModel, num_tokens: int, *, num_cached: int = _CACHED) -> float:
    """Seconds of reading so many tokens after some others, which stay in the cache for the next time."""
    model.start([0] * num_cached, reuse_prefix=True)
    started = time.perf_counter()
    logits, _ = model.forward([0] * num_tokens)
    float(logits[-1, 0])  # on a GPU, wait for it
    seconds = time.perf_counter() - started
    model.keep(num_cached)
    return seconds
