"""State of one batch during verification on the V2 runner: the rules' inputs besides a chunk's logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import tl_rand32
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

NOISE_KEY = 0x5DEECE66D  # sets a request's noise apart from the draws of vLLM's own samplers


@dataclass
class V2Round:
    """One batch that is being verified; vLLM may cut it into chunks of whole requests."""

    request_ids: list[str]
    num_rows: np.ndarray  # [B], logits rows of each request
    states: Tensor | None  # [rows, D], the target's hidden states
    draft_logits: Tensor | None  # [slots, K, V], before temperature
    seeds: Tensor  # [slots]
    longest: int | None = None  # upper bound of the texts' lengths in tokens
    raw_logits: Tensor | None = field(default=None, init=False)  # [N, V] of the chunk, before any processor
    requests: slice = field(default_factory=lambda: slice(0, 0), init=False)  # of the chunk
    rows: slice = field(default_factory=lambda: slice(0, 0), init=False)  # of the chunk

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)

    def begin_chunk(self, raw_logits: Tensor, num_requests: int) -> None:
        """Advance to vLLM's next chunk of requests, whether or not any of them uses a rule."""
        self.raw_logits = raw_logits
        self.requests = slice(self.requests.stop, self.requests.stop + num_requests)
        self.rows = slice(self.rows.stop, self.rows.stop + len(raw_logits))

    def hidden(self, *, ahead: int = 0) -> Tensor:
        """Return the hidden states `ahead` rows after each of the chunk's rows, [N, D]; past the end, the last one."""
        assert self.states is not None
        rows = torch.arange(self.rows.start + ahead, self.rows.stop + ahead, device=self.states.device)
        return self.states[rows.clamp_max(len(self.states) - 1)]

    def draft_scores(self, ctx: LogitsContext) -> Tensor | None:
        """The logits that each row's drafted token was drawn from, [N, V]; None where the drafter keeps none."""
        if self.draft_logits is None:
            return None
        steps = ctx.expanded_local_pos.long().clamp_max(self.draft_logits.shape[1] - 1)
        return self.draft_logits[ctx.expanded_idx_mapping.long(), steps].float()

    def uniforms(self, ctx: LogitsContext) -> Tensor:
        """The draws that vLLM's rejection sampler will use, [N]."""
        return uniforms_of(self.seeds, ctx.expanded_idx_mapping, ctx.pos)

    def noise(self, ctx: LogitsContext) -> Tensor:
        """Return the draws for randomized rules, [N]; they depend on seed and position, not on other requests."""
        return uniforms_of(self.seeds ^ NOISE_KEY, ctx.expanded_idx_mapping, ctx.pos)


@triton.jit
def _uniforms_kernel(uniforms, seeds, slots, positions):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    seed = tl.load(seeds + tl.load(slots + row).to(tl.int64))
    tl.store(uniforms + row, tl_rand32(seed, tl.load(positions + row), includes_zero=False))


def uniforms_of(seeds: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Return the draw that accepts or rejects at each row, [N] in (0, 1): vLLM's sampler draws the same later.

    Args:
        seeds: [slots], one for each request.
        slots: [N], the request slot of each row.
        positions: [N], the position of each row in its text.
    """
    drawn = torch.empty(len(positions), dtype=torch.float32, device=positions.device)
    kernel: Any = _uniforms_kernel
    kernel[(len(positions),)](drawn, seeds, slots, positions, num_warps=1)
    return drawn
