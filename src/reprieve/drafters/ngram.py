"""Prompt lookup: propose the tokens that followed the most recent occurrence of the last n-gram. No model needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reprieve.drafters.base import Drafter, DrafterSettings, register_drafter
from reprieve.drafters.length import DraftLength, RoundLength
from reprieve.errors import SpecError, require_counts
from reprieve.models.loading import ModelPair
from reprieve.models.sampling import Sampler
from reprieve.rules import Rule
from reprieve.transfers import device_tensor
from reprieve.types import Block, Outcome, Prefill, Verification


@register_drafter
@dataclass(frozen=True)
class NgramSettings(DrafterSettings):
    """Prompt lookup.

    Args:
        max_ngram: longest suffix looked up, 1 or more; shorter ones down to `min_ngram` are tried next.
        min_ngram: shortest suffix looked up.
    """

    name = "ngram"

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        require_counts(self, "max_ngram")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise SpecError(f"min_ngram must be in [1, max_ngram = {self.max_ngram}], got {self.min_ngram}")

    def build(self, pair: ModelPair, rule: Rule, length: DraftLength) -> NgramDrafter:
        return NgramDrafter(pair.device, self)


class NgramDrafter(Drafter):
    """Proposes the continuation of the most recent occurrence of the longest matching n-gram.

    Args:
        device: device of the returned blocks.
    """

    name = "ngram"

    def __init__(self, device: torch.device, settings: NgramSettings | None = None) -> None:
        self.device = device
        self.settings = settings or NgramSettings()
        self.token_ids: list[int] = []

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        self.token_ids = list(prompt_ids)

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        continuation = self._lookup(max_depth)
        if not continuation:
            return Block.empty(self.device)
        return Block.chain(device_tensor(continuation, torch.long, self.device), deterministic=True)

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        self.token_ids += outcome.committed_ids

    def _lookup(self, max_depth: int) -> list[int]:
        tokens = self.token_ids
        for size in range(min(self.settings.max_ngram, len(tokens) - 1), self.settings.min_ngram - 1, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + max_depth]
        return []
