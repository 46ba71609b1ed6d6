"""A response and what else could have stood in it, read in one forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reprieve.models.cached_model import CachedModel
from reprieve.types import ROOT, Block, HiddenStates


class ResponseTree:
    """A response as a chain of nodes, and a leaf for every token that was tried at a place but is not in it."""

    def __init__(self, response_ids: Sequence[int]) -> None:
        self.token_ids = list(response_ids)
        self.parents = list(range(ROOT, len(self.token_ids) - 1))
        self._rows = {(place, token_id): place + 1 for place, token_id in enumerate(self.token_ids)}

    def add(self, position: int, token_id: int) -> None:
        """A token in the response's place `position`, unless it is there already."""
        if (position, token_id) not in self._rows:
            self.token_ids.append(token_id)
            self.parents.append(position - 1 if position else ROOT)
            self._rows[position, token_id] = len(self.token_ids)

    def row(self, position: int, token_id: int) -> int:
        """Which row of the forward encodes a token at a place of the response."""
        return self._rows[position, token_id]

    def read(self, model: CachedModel, prompt_ids: Sequence[int]) -> tuple[Tensor, HiddenStates | None]:
        """Logits and hidden states after the prompt's last token (row 0) and after every node: [N + 1, ...]."""
        model.start(list(prompt_ids[:-1]), reuse_prefix=True)
        block = Block(torch.tensor(self.token_ids, device=model.device), self.parents)
        return model.forward([prompt_ids[-1], *self.token_ids], block)
