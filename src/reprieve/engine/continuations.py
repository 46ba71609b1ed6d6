"""Continuations of texts by one model, many at once, with shared prefixes.

Nothing is drafted: with many texts in flight, a forward's fixed cost no longer dominates, and batching alone gains more
than speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.engine.batches import TextBatch, TextRow
from reprieve.models.cache import Snapshot
from reprieve.models.cached_model import require_positions, shared_length
from reprieve.models.row_model import RowModel, Unread
from reprieve.models.sampling import Draw, Sampler, UniformDraw, choose
from reprieve.settings import SamplingParams
from reprieve.transfers import device_tensor, to_device

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


class ContinuationDecoder(TextBatch[TextRequest, TextRow[TextRequest]]):
    """Continues up to `num_rows` texts at once.

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
        stops: Callable[[list[int]], bool] = lambda response_ids: False,
    ) -> None:
        super().__init__(num_rows)
        self.model = model
        self.eos_ids = eos_ids
        self.stops = stops
        self._model = RowModel(model, num_rows)
        self.sampler = Sampler(params, self._model.device)
        # On accelerators, a further forward costs more than the tokens that it saves.
        self._reads_at_once = self._model.device.type != "cpu"

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

    @torch.inference_mode()
    def step(self) -> None:
        """Generate one token for every text in progress; waiting ones take free rows first."""
        self._admit()
        device = self._model.device
        numbers, active, read = self._in_progress(device)
        if not active:
            return
        last = torch.tensor([row.token_ids[-1:] if row else [0] for row in read])
        lengths = [len(row.token_ids) - 1 if row else 0 for row in read]
        positions = device_tensor(lengths, torch.long, device)[:, None]
        logits, _ = self._model.forward(to_device(last, device), positions, longest=max(lengths) + 1)
        chosen = self._choose(logits[numbers, -1].float(), active)
        for number, row, token_id in zip(numbers, active, chosen, strict=True):
            self._take(number, row, token_id)

    def _copy_row(self, source: int, to: int) -> None:
        self._model.cache.copy_row(source, to)

    def _admit(self) -> None:
        """Assign free rows to waiting texts, restore their sessions' caches, and read the rest but the last tokens."""
        admitted: list[tuple[int, TextRow[TextRequest]]] = []
        for index, row in enumerate(self._rows):
            if row is None and self._waiting:
                request = self._waiting.popleft()
                admitted.append((index, TextRow(request, list(request.prefix_ids))))
                self._rows[index] = admitted[-1][1]
        if self._reads_at_once:
            self._read(admitted)
            return
        while admitted:  # one text of each session at a time: the next can start from what it has read
            first = {id(row.request.session): (index, row) for index, row in reversed(admitted)}
            self._read(list(first.values()))
            started = {index for index, _ in first.values()}
            admitted = [(index, row) for index, row in admitted if index not in started]

    def _read(self, admitted: Sequence[tuple[int, TextRow[TextRequest]]]) -> None:
        """Restore each text's longest cached prefix and read all but the last token; keep a snapshot per session."""
        unread: dict[int, Unread] = {}
        for index, row in admitted:
            snapshot, length = row.request.session.longest_prefix(row.token_ids)
            if snapshot is not None:
                self._model.cache.restore(index, snapshot, length)
            if length < len(row.token_ids) - 1:
                unread[index] = Unread(index, length, row.token_ids[length:-1])
        self._model.prefill(list(unread.values()))
        last = {id(row.request.session): (index, row) for index, row in admitted if index in unread}
        for index, row in last.values():
            read = row.token_ids[:-1]
            row.request.session.keep(self._model.cache.snapshot(index, read), read)

    def _choose(self, logits: Tensor, active: list[TextRow[TextRequest]]) -> list[int]:
        """Return the next token of each text, from logits [len(active), V]."""
        draws = [row.request.draw for row in active]
        if self.sampler.greedy or not any(draws):
            return [int(token_id) for token_id in logits.argmax(-1).tolist()]
        return choose(self.sampler.target_scores(logits), draws, [row.token_ids for row in active])

    def _take(self, number: int, row: TextRow[TextRequest], token_id: int) -> None:
        request, cached = row.request, list(row.token_ids)
        row.token_ids.append(token_id)
        stopped = self.stops(row.token_ids[request.response_start :])
        new_ids = row.token_ids[len(request.prefix_ids) :]
        if stopped or token_id in self.eos_ids or len(new_ids) == request.max_new_tokens:
            if not isinstance(request.draw, UniformDraw):  # later texts do not begin with a random continuation
                request.session.keep(self._model.cache.snapshot(number, cached), request.prefix_ids)
            self._rows[number] = None
            request.on_done(new_ids)
