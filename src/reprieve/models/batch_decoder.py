"""Batched generation with one model and shared prefixes, for the suffixes that miners regenerate.

It does not draft: with many texts in flight, a forward's fixed cost no longer dominates, and batching alone gains more
than speculation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.errors import require_whole
from reprieve.models.batch_cache import Snapshot
from reprieve.models.cached_model import require_positions, shared_length
from reprieve.models.draws import Draw, choose
from reprieve.models.row_model import RowModel, Unread
from reprieve.models.sampling import Sampler
from reprieve.settings import SamplingParams
from reprieve.transfers import spread, to_device

_SNAPSHOTS = 2  # per session: the running text and the last attempt


@dataclass
class Session:
    """Texts with a common beginning, such as one problem's; each reuses the longest cached prefix."""

    snapshots: list[Snapshot] = field(default_factory=list)

    def keep(self, snapshot: Snapshot, prefix_ids: Sequence[int]) -> None:
        """Store a snapshot; when full, replace the one with the shortest prefix in common with `prefix_ids`."""
        if len(self.snapshots) == _SNAPSHOTS:
            shared = [shared_length(old.token_ids, prefix_ids) for old in self.snapshots]
            del self.snapshots[len(shared) - 1 - shared[::-1].index(min(shared))]
        self.snapshots.append(snapshot)

    def longest_prefix(self, token_ids: Sequence[int]) -> tuple[Snapshot | None, int]:
        """Return the snapshot with the longest common prefix, and its length, at most `len(token_ids) - 1`."""
        best, length = None, 0
        for snapshot in self.snapshots:
            shared = min(shared_length(token_ids, snapshot.token_ids), len(token_ids) - 1)
            if shared > length:
                best, length = snapshot, shared
        return best, length


@dataclass(eq=False)
class TextRequest:
    """One text to continue.

    Args:
        prefix_ids: prompt and the given part of the response.
        response_start: length of the prompt, which is not searched for stop texts.
        max_new_tokens: exact limit on new tokens, the end-of-text token included.
        draw: random draws of the tokens; None for greedy decoding.
        on_done: called with the new tokens.
    """

    session: Session
    prefix_ids: list[int]
    max_new_tokens: int
    draw: Draw | None
    on_done: Callable[[list[int]], None]
    response_start: int = 0


@dataclass
class _Row:
    request: TextRequest
    token_ids: list[int]  # prefix and new tokens; all but the last are cached

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - len(self.request.prefix_ids)


class BatchDecoder:
    """Generates up to `num_rows` texts at once; call `submit`, then `step` until `idle`.

    Args:
        model: any `transformers` causal language model with a key-value cache.
        num_rows: texts in one forward, 1 or more.
        params: temperature, top-k and top-p, for every text.
        eos_ids: tokens that end a text.
        stops: returns True if a response's tokens end it; called after each token.

    Raises:
        SpecError: fewer than 1 row.
        UnsupportedModelError: a model with recurrent state, or with ALiBi biases that need a padding mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_rows: int,
        params: SamplingParams,
        eos_ids: frozenset[int],
        stops: Callable[[list[int]], bool] | None = None,
    ) -> None:
        require_whole("num_rows", num_rows, 1)
        self.model = model
        self.eos_ids = eos_ids
        self.stops = stops
        self.sampler = Sampler(params, model.device)
        self.num_read = 0  # tokens read by forwards, without padding
        self.num_generated = 0
        self._model = RowModel(model, num_rows)
        self._rows: list[_Row | None] = [None] * num_rows
        self._waiting: deque[TextRequest] = deque()

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(self._rows)

    def submit(self, request: TextRequest) -> None:
        """Queue a text; it finishes immediately if `max_new_tokens` is below 1.

        Raises:
            ContextOverflowError: the text could exceed the model's positions.
        """
        if request.max_new_tokens < 1:
            request.on_done([])
            return
        num_positions = len(request.prefix_ids) + request.max_new_tokens
        require_positions(self.model, num_positions, what=f"prefix and {request.max_new_tokens} new tokens")
        self._waiting.append(request)

    def drop(self, request: TextRequest) -> None:
        """Cancel a text."""
        self._waiting = deque(other for other in self._waiting if other is not request)
        self._rows = [None if row and row.request is request else row for row in self._rows]

    def clear(self) -> None:
        """Cancel every text, after a failed forward."""
        self._waiting.clear()
        self._rows = [None] * len(self._rows)

    @torch.inference_mode()
    def step(self) -> None:
        """Generate one token for every text in flight; waiting texts take free rows first."""
        self._admit()
        active = [index for index, row in enumerate(self._rows) if row]
        if not active:
            return
        rows = self._rows if self.model.device.type == "cuda" else self._rows[: active[-1] + 1]  # CUDA graphs need all
        logits = self._forward([row.token_ids[-1:] if row else [0] for row in rows], self._lengths(rows))
        self.num_read += len(active)
        for index, token_id in zip(active, self._choose(logits[active, -1], active), strict=True):
            self._take(index, token_id)

    @staticmethod
    def _lengths(rows: Sequence[_Row | None]) -> list[int]:
        return [len(row.token_ids) - 1 if row else 0 for row in rows]

    def _admit(self) -> None:
        """Assign free rows to waiting texts, restore their sessions' caches, and read the rest but the last tokens."""
        admitted: list[tuple[int, _Row]] = []
        for index, row in enumerate(self._rows):
            if row is None and self._waiting:
                request = self._waiting.popleft()
                admitted.append((index, _Row(request, list(request.prefix_ids))))
                self._rows[index] = admitted[-1][1]
        while admitted:  # one text of each session at a time: the next can start from what it has read
            first = {id(row.request.session): (index, row) for index, row in reversed(admitted)}
            self._read(list(first.values()))
            started = {index for index, _ in first.values()}
            admitted = [(index, row) for index, row in admitted if index not in started]

    def _read(self, admitted: Sequence[tuple[int, _Row]]) -> None:
        """Restore each text's longest cached prefix and read the rest but the last token, for texts of its session."""
        unread: dict[int, Unread] = {}
        for index, row in admitted:
            snapshot, length = row.request.session.longest_prefix(row.token_ids)
            if snapshot is not None:
                self._model.cache.restore(index, snapshot, length)
            if length < len(row.token_ids) - 1:
                unread[index] = Unread(index, length, row.token_ids[length:-1])
        self._model.prefill(list(unread.values()))
        for index, row in admitted:
            if index in unread:
                self.num_read += len(unread[index].token_ids)
                read = row.token_ids[:-1]
                row.request.session.keep(self._model.cache.snapshot(index, read), read)

    def _choose(self, logits: Tensor, active: list[int]) -> list[int]:
        """Return the next token of each text, from logits [len(active), V]."""
        rows = [row for index in active if (row := self._rows[index]) is not None]
        draws = [row.request.draw for row in rows]
        if self.sampler.greedy or not any(draws):
            return [int(token_id) for token_id in logits.argmax(-1).tolist()]
        scores = self.sampler.target_scores(logits)
        return choose(scores, draws, [row.token_ids for row in rows])

    def _take(self, index: int, token_id: int) -> None:
        row = self._rows[index]
        assert row is not None
        cached = list(row.token_ids)
        row.token_ids.append(token_id)
        self.num_generated += 1
        request = row.request
        stopped = self.stops is not None and self.stops(row.token_ids[request.response_start :])
        if stopped or token_id in self.eos_ids or row.num_new == request.max_new_tokens:
            request.session.keep(self._model.cache.snapshot(index, cached), request.prefix_ids)
            self._rows[index] = None
            request.on_done(row.token_ids[len(request.prefix_ids) :])

    def _forward(self, token_ids: list[list[int]], lengths: list[int]) -> Tensor:
        """Append a token to each of the first rows, which hold `lengths` tokens; return logits [R, 1, V]."""
        device = self.model.device
        positions = spread(lengths, torch.long, device)[:, None]
        read, _ = self._model.forward(to_device(torch.tensor(token_ids), device), positions, longest=max(lengths) + 1)
        return read.float()
