"""Response and its tried alternatives, read in one forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reprieve.models.cached_model import CachedModel
from reprieve.types import ROOT, Block, HiddenStates


class ResponseTree:
    """Response as a chain of nodes, with a leaf for every token that was tried at a position but not kept."""

    def __init__(self, response_ids: Sequence[int]) -> None:
        self.token_ids = list(response_ids)
        self.parents = list(range(ROOT, len(self.token_ids) - 1))
        self._rows = {(position, token_id): position + 1 for position, token_id in enumerate(self.token_ids)}

    def add(self, position: int, token_id: int) -> None:
        """Add a token at the response's position `position`, unless present."""
        if (position, token_id) not in self._rows:
            self.token_ids.append(token_id)
            self.parents.append(position - 1 if position else ROOT)
            self._rows[position, token_id] = len(self.token_ids)

    def row(self, position: int, token_id: int) -> int:
        """Return the row of the forward that encodes a token at a position of the response."""
        return self._rows[position, token_id]

    def read(self, model: CachedModel, prompt_ids: Sequence[int]) -> tuple[Tensor, HiddenStates | None]:
        """Return logits and hidden states after the prompt's last token (row 0) and after every node: [N + 1, ...]."""
        model.start(list(prompt_ids[:-1]), reuse_prefix=True)
        block = Block(torch.tensor(self.token_ids, device=model.device), self.parents)
        return model.forward([prompt_ids[-1], *self.token_ids], block)
