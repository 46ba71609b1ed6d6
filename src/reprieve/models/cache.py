"""KV cache with exact rollback: buffers are written in place, and dropping tokens only changes a length."""

from __future__ import annotations

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


class RollbackLayer(DynamicLayer):
    """Keys and values of one layer, [1, heads, length, head_dim], in a buffer that doubles when full.

    Sliding-window layers keep all tokens too: the mask implements their window, and a cache without the old tokens
    could not be rolled back.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.length = 0
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new states and return all of them."""
        end = self.length + key_states.shape[-2]
        if self._key_buffer is None or end > self._key_buffer.shape[-2]:
            self._grow(key_states, value_states, end)
        assert self._key_buffer is not None and self._value_buffer is not None
        self._key_buffer[..., self.length : end, :] = key_states
        self._value_buffer[..., self.length : end, :] = value_states
        self._set_length(end)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def keep(self, length: int) -> None:
        """Drop everything after the first `length` tokens."""
        self._set_length(min(length, self.length))

    def keep_path(self, start: int, rows: Tensor) -> None:
        """Move the tokens at `start + rows` to `start` onwards and drop the rest after them."""
        end = start + len(rows)
        for buffer in (self._key_buffer, self._value_buffer):
            if buffer is not None:
                buffer[..., start:end, :] = buffer.index_select(-2, start + rows)
        self._set_length(end)

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self._set_length(0)

    def _grow(self, key_states: Tensor, value_states: Tensor, needed: int) -> None:
        capacity = capacity_for(needed)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        buffers = []
        for old, states in ((self._key_buffer, key_states), (self._value_buffer, value_states)):
            shape = (*states.shape[:-2], capacity, states.shape[-1])
            buffer = torch.zeros(shape, dtype=states.dtype, device=states.device)
            if old is not None:
                buffer[..., : self.length, :] = old[..., : self.length, :]
            buffers.append(buffer)
        self._key_buffer, self._value_buffer = buffers

    def _set_length(self, length: int) -> None:
        self.length = length
        if self._key_buffer is not None and self._value_buffer is not None:
            self.keys = self._key_buffer[..., :length, :]
            self.values = self._value_buffer[..., :length, :]


class RollbackCache(Cache):
    """One `RollbackLayer` per layer; pass it to `transformers` models as `past_key_values`."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RollbackLayer)

    def keep(self, length: int) -> None:
        """Drop everything after the first `length` tokens, in every layer."""
        for layer in self.layers:
            assert isinstance(layer, RollbackLayer)
            layer.keep(length)

    def keep_path(self, start: int, rows: Tensor) -> None:
        """Keep the first `start` tokens and, after them, those at `start + rows`, in every layer."""
        for layer in self.layers:
            assert isinstance(layer, RollbackLayer) and layer.keys is not None
            layer.keep_path(start, rows.to(layer.keys.device))
