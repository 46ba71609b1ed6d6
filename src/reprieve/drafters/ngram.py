"""Prompt lookup: propose what followed the last few tokens the last time they occurred. No model, no distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprieve.errors import SpecError
from reprieve.models.sampling import Sampler
from reprieve.types import Block, Outcome, Prefill, Verification


class NgramDrafter:
    """Looks the longest recent n-gram up in prompt and answer.

    Args:
        device: where the target wants the block.
        max_ngram: longest suffix looked up, 1 or more; shorter ones are tried down to `min_ngram`.
        min_ngram: shortest suffix looked up.
    """

    name = "ngram"
    target_layers: tuple[int, ...] = ()
    drafts_trees = False
    provides: frozenset[str] = frozenset()

    def __init__(self, device: torch.device, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise SpecError(f"min_ngram must be in [1, max_ngram = {max_ngram}], got {min_ngram}")
        self.device = device
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.token_ids: list[int] = []

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        self.token_ids = list(prompt_ids)

    def propose(self, max_depth: int) -> Block:
        found = self._lookup(max_depth)
        if not found:
            return Block.empty(self.device)
        return Block.chain(torch.tensor(found, device=self.device), deterministic=True)

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        self.token_ids += [int(block.token_ids[node]) for node in outcome.path] + [outcome.next_token_id]

    def _lookup(self, max_depth: int) -> list[int]:
        tokens = self.token_ids
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + max_depth]
        return []
