"""KV caches: of one sequence, with exact rollback, and of several independent sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_CAPACITY = 256


def capacity_for(num_tokens: int) -> int:
    """Return the capacity of a buffer for this many tokens; capacities double, so that buffers rarely grow."""
    capacity = _FIRST_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def _grown(old: Tensor | None, num_tokens: int, outer: Sequence[int], states: Tensor) -> Tensor:
    """Return a buffer [*outer, capacity, head_dim] for states [..., n, head_dim]; it starts as an old one."""
    buffer = states.new_zeros(*outer, capacity_for(num_tokens), states.shape[-1])
    if old is not None:
        buffer[..., : old.shape[-2], :] = old
    return buffer


class RollbackCache(Cache):
    """transformers' growing cache of one sequence, with exact rollback: pass it as `past_key_values`.

    Sliding-window layers keep all tokens too: the mask implements their window, and a cache without the old tokens
    could not be rolled back. Each forward copies the cache, as in transformers' `generate`; `models.direct` does not.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def truncate(self, length: int) -> None:
        """Drop everything after the first `length` tokens, in every layer."""
        for layer in self.layers:
            assert isinstance(layer, DynamicLayer)
            if layer.get_seq_length() > length:  # not where a first forward failed and left the layer empty
                assert layer.keys is not None and layer.values is not None
                layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    def keep_path(self, start: int, rows: Tensor) -> None:
        """Keep the first `start` tokens and, after them, those at `start + rows`, in every layer."""
        for layer in self.layers:
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            kept = start + rows.to(layer.keys.device)
            for states in (layer.keys, layer.values):
                states[..., start : start + len(kept), :] = states.index_select(-2, kept)
        self.truncate(start + len(rows))


@dataclass(frozen=True)
class Snapshot:
    """Cached states of one text, for texts with the same prefix."""

    token_ids: list[int]
    states: list[tuple[Tensor, Tensor]]  # per layer: keys and values, [heads, length, head_dim]


class _Placement:
    """Write positions of the next forward: token j of its row i at `positions[i, j]`."""

    rows: Tensor | int  # [R], or the first of R consecutive ones
    positions: Tensor  # [R, n], int64
    end: int  # number of columns the forward attends to


class RowLayer(DynamicLayer):
    """Keys and values of one layer for all rows, [rows, heads, capacity, head_dim]."""

    def __init__(self, num_rows: int, placement: _Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows = num_rows
        self.placement = placement

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write each row's new states at its own positions; return the rows' states so far, padded to one length."""
        placement = self.placement
        num = len(placement.positions)
        self.reserve(placement.end, key_states, value_states)
        read: Tensor | slice
        if isinstance(placement.rows, Tensor):
            rows = read = placement.rows.to(key_states.device)
        else:
            read = slice(placement.rows, placement.rows + num)
            rows = torch.arange(placement.rows, placement.rows + num, device=key_states.device)
        positions = placement.positions.to(key_states.device)  # layers can be on several devices
        results = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None
            buffer[rows[:, None], :, positions] = states.transpose(1, 2)
            results.append(buffer[read, :, : placement.end])
        return results[0], results[1]

    @property
    def capacity(self) -> int:
        """Number of tokens that a row has room for."""
        return 0 if self.keys is None or not self.is_initialized else self.keys.shape[-2]

    def reserve(self, length: int, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for texts of `length` tokens; dtype and shape follow the states, [..., heads, any, head_dim]."""
        if self.capacity >= length:
            return
        keys, values = (self.keys, self.values) if self.is_initialized else (None, None)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = _grown(keys, length, (self.num_rows, key_states.shape[-3]), key_states)
        self.values = _grown(values, length, (self.num_rows, value_states.shape[-3]), value_states)

    def get_seq_length(self) -> int:
        return 0  # rows have different lengths; positions and masks are arguments


class RowCache(Cache):
    """One `RowLayer` per layer; call `place` before each forward."""

    def __init__(self, num_rows: int, num_layers: int) -> None:
        self.placement = _Placement()
        super().__init__(layers=[RowLayer(num_rows, self.placement) for _ in range(num_layers)])

    @property
    def capacity(self) -> int:
        """Number of tokens that a row has room for; 0 before the first forward."""
        return min(layer.capacity for layer in self.layers if isinstance(layer, RowLayer))

    def reserve(self, length: int) -> None:
        """Make room for texts of `length` tokens, which moves the buffers. No effect before a forward."""
        if not 0 < self.capacity < length:
            return
        for layer in self.layers:
            assert isinstance(layer, RowLayer) and layer.keys is not None and layer.values is not None
            layer.reserve(length, layer.keys, layer.values)

    def place(self, rows: Tensor | int, positions: Tensor, end: int) -> None:
        """Set the next forward: its rows, at `positions` [R, n], attending to `end` columns.

        Args:
            rows: indices [R], or the first of R consecutive rows.
        """
        self.placement.rows, self.placement.positions, self.placement.end = rows, positions, end

    def copy_row(self, source: int, to: int) -> None:
        """Copy a row's states to another row."""
        for layer in self.layers:
            assert isinstance(layer, RowLayer)
            if layer.capacity:
                assert layer.keys is not None and layer.values is not None
                layer.keys[to], layer.values[to] = layer.keys[source], layer.values[source]

    def snapshot(self, row: int, token_ids: list[int]) -> Snapshot:
        """Return a copy of a row's first `len(token_ids)` tokens."""
        size = len(token_ids)
        states = []
        for layer in self.layers:
            assert isinstance(layer, RowLayer) and layer.keys is not None and layer.values is not None
            states.append((layer.keys[row, :, :size].clone(), layer.values[row, :, :size].clone()))
        return Snapshot(token_ids, states)

    def restore(self, row: int, snapshot: Snapshot, length: int) -> None:
        """Copy a snapshot's first `length` tokens into a row."""
        for layer, (keys, values) in zip(self.layers, snapshot.states, strict=True):
            assert isinstance(layer, RowLayer)
            layer.reserve(length, keys, values)
            assert layer.keys is not None and layer.values is not None
            layer.keys[row, :, :length] = keys[:, :length]
            layer.values[row, :, :length] = values[:, :length]
