"""Cached-model interface to a target on servers: next-token log-probabilities, without local weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.errors import SpecError, require_whole
from reprieve.mining.settings import MOST_CANDIDATES
from reprieve.models.cached_model import CachedModel
from reprieve.types import Block, HiddenStates, Prefill

Read = Callable[[Sequence[int], int, int], list[Mapping[int, float]]]


class ServedModel(CachedModel):
    """Returns the log-probabilities of the most likely next tokens as logits, -inf for all others; enough for sampling.

    Nothing is cached, because vLLM itself rereads the whole text to return log-probabilities of its tokens.

    Args:
        read: requests the candidates after each of the last tokens of a text; takes the text, the number of tokens, and
            the number of candidates for each.
        stand_in: a model with the same tokenizer; only its positions and device matter.
        num_candidates: per position, 1 to `MOST_CANDIDATES`.
    """

    def __init__(self, read: Read, stand_in: PreTrainedModel, *, vocab_size: int, num_candidates: int) -> None:
        super().__init__(stand_in, vocab_size=vocab_size, direct=False)
        require_whole("num_candidates", num_candidates, 1, MOST_CANDIDATES)
        self._read = read
        self._num_candidates = num_candidates
        self._num_columns = vocab_size

    def start(self, token_ids: Sequence[int], *, reuse_prefix: bool = False) -> Prefill:
        """Start a text as `CachedModel` does; requests nothing yet."""
        self.cached_ids = list(token_ids)
        return Prefill()

    def keep(self, length: int) -> None:
        """Roll back to the first `length` tokens."""
        del self.cached_ids[length:]

    def keep_path(self, start: int, rows: list[int]) -> None:
        """Keep the first `start` tokens and, of those after them, the given rows."""
        self.cached_ids[start:] = [self.cached_ids[start + row] for row in rows]

    def _run(
        self, token_ids: Sequence[int] | Tensor, *, num_logits: int | None, tree: Block | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        if tree is not None:
            raise SpecError("a target on servers can verify chains only, but the drafter drafts trees")
        new = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        num_rows = len(new) if num_logits is None else num_logits
        logprobs = self._read([*self.cached_ids, *new], num_rows, self._num_candidates)
        logits = torch.full((num_rows, self._num_columns), -math.inf)
        for row, candidates in enumerate(logprobs):
            # Columns beyond the draft's are padding of the target's vocabulary.
            known = {token_id: value for token_id, value in candidates.items() if token_id < self._num_columns}
            logits[row, list(known)] = torch.tensor(list(known.values()))
        self.cached_ids += new
        return logits.to(self.device), None
