"""The random numbers of vLLM's V2 rejection sampler, drawn ahead: they depend on seed and position alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import tl_rand32


@triton.jit
def _uniforms_kernel(uniforms, seeds, slots, positions):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    seed = tl.load(seeds + tl.load(slots + row).to(tl.int64))
    tl.store(uniforms + row, tl_rand32(seed, tl.load(positions + row), includes_zero=False))


def uniforms_of(seeds: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Return the draw that accepts or rejects at each row, [N] in (0, 1).

    Args:
        seeds: [slots], one for each request.
        slots: [N], the request slot of each row.
        positions: [N], the position of each row in its text.
    """
    drawn = torch.empty(len(positions), dtype=torch.float32, device=positions.device)
    kernel: Any = _uniforms_kernel
    kernel[(len(positions),)](drawn, seeds, slots, positions, num_warps=1)
    return drawn
