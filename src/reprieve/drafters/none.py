"""No drafting: every round is one plain target step, so target-only decoding uses the same loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprieve.drafters.length import RoundLength
from reprieve.models.sampling import Sampler
from reprieve.needs import Need
from reprieve.types import Block, Outcome, Prefill, Verification


class NoDrafter:
    """Proposes nothing: every round is one plain target step."""

    name = "none"
    target_layers: tuple[int, ...] = ()
    drafts_trees = False
    provides = frozenset({Need.DRAFT_PROBS, Need.DRAFT_HIDDEN})  # no tokens, so no rule lacks an input

    def __init__(self, device: torch.device) -> None:
        self._empty = Block.empty(device)

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None: ...

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        return self._empty

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None: ...
