"""Forward of one model over several sequences of different lengths, one per row of its cache."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from reprieve.errors import UnsupportedModelError
from reprieve.models.attention import additive, grouped_attention, layer_windows, masks_by_layer, without_cudnn
from reprieve.models.cache import RowCache
from reprieve.models.cached_model import execution_device, max_positions, refuse_recurrent
from reprieve.models.direct import FAMILIES
from reprieve.transfers import device_tensor, to_device
from reprieve.types import HiddenStates

ATTENTION = "reprieve_rows"
_PREFILL_TOKENS = 16_384  # padded tokens of one forward that reads prompts
_switching = threading.Lock()  # held while a model's attention is switched
GRAPH_COLUMNS = 128  # on a GPU, forwards attend to a multiple of this, so that few CUDA graphs are needed


class Unread(NamedTuple):
    """The part of a text that a model has yet to read.

    Args:
        row: of the cache.
        start: number of tokens that the row holds.
        token_ids: the following ones, 1 or more.
    """

    row: int
    start: int
    token_ids: list[int]


class RowModel:
    """A model and its cache for `num_rows` sequences. On a GPU, forwards over all rows run as CUDA graphs.

    Args:
        model: any `transformers` causal language model with a key-value cache.
        hidden_layers: layers whose hidden states `forward` returns, as transformers numbers them.

    Raises:
        UnsupportedModelError: a model with recurrent state, or with ALiBi biases that need a padding mask.
    """

    def __init__(self, model: PreTrainedModel, num_rows: int, *, hidden_layers: Sequence[int] = ()) -> None:
        refuse_recurrent(model)
        _refuse_alibi(model)
        self.model = model
        self.num_rows = num_rows
        self.hidden_layers = tuple(hidden_layers)
        self.cache = RowCache(num_rows, model.config.get_text_config().num_hidden_layers)
        self._windows = layer_windows(model)
        limit = max_positions(model)
        self._last_position = None if limit is None else limit - 1
        # Other families can have sinks, soft caps or biases, which `grouped_attention` does not implement.
        self._grouped = type(model).__name__ in FAMILIES
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._captured = 0  # capacity of the cache that the graphs write to
        self._pool: Any = None
        self._captures = len(set(getattr(model, "hf_device_map", {}).values())) < 2
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return execution_device(self.model)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, *, longest: int) -> tuple[Tensor, HiddenStates]:
        """Read tokens; return their logits [R, n, V] and hidden states [R, n, D] by layer, until the next forward.

        Args:
            token_ids: [R, n], of the first R rows of the cache, on the model's device.
            positions: [R, n]: where they are in their sequences.
            longest: number of columns that they attend to: more than every position.
        """
        if not token_ids.is_cuda:
            return self._run(token_ids, positions, longest)
        longest = -(-longest // GRAPH_COLUMNS) * GRAPH_COLUMNS
        self.cache.reserve(longest)
        if not (self._captures and len(token_ids) == self.num_rows and self.cache.capacity):
            return self._run_once(token_ids, positions, longest)
        if self._captured != self.cache.capacity:  # the buffers have moved since
            self._graphs.clear()
            self._captured = self.cache.capacity
        key = token_ids.shape[1], longest
        if key not in self._graphs:
            if not self._graphs:  # PyTorch releases a pool with its last graph
                self._pool = torch.cuda.graph_pool_handle()
            try:
                self._graphs[key] = _Graph(
                    lambda ids, places: self._run(ids, places, longest), token_ids, positions, self._pool
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a model whose code waits for the device cannot be captured
                name = type(self.model).__name__
                warnings.warn(f"{name} runs without CUDA graphs, which is slower: {error}", stacklevel=2)
                self._captures = False
                return self._run_once(token_ids, positions, longest)
        read: tuple[Tensor, HiddenStates] = self._graphs[key](token_ids, positions)
        return read

    @torch.inference_mode()
    def prefill(
        self, texts: Sequence[Unread], on_read: Callable[[Sequence[Unread], HiddenStates], None] | None = None
    ) -> None:
        """Read the rest of several texts, in forwards over texts of similar length, without their logits.

        Args:
            on_read: called with the texts of each forward and their hidden states [r, n, D] by layer, padded.
        """
        for group in _of_similar_length(texts):
            size = len(group[0].token_ids)
            padded = [text.token_ids + [0] * (size - len(text.token_ids)) for text in group]
            starts = device_tensor([text.start for text in group], torch.long, self.device)
            # Padding is overwritten before any token attends to it.
            _, hidden = self._run_once(
                to_device(torch.tensor(padded), self.device),
                starts[:, None] + torch.arange(size, device=self.device),
                max(text.start for text in group) + size,
                device_tensor([text.row for text in group], torch.long, self.device),
                num_logits=1,
            )
            if on_read is not None:
                on_read(group, hidden)

    def _run_once(self, *args: Any, **keywords: Any) -> tuple[Tensor, HiddenStates]:
        """Run a forward of a shape that may not occur again."""
        with without_cudnn(self.device):
            return self._run(*args, **keywords)

    def _run(
        self, token_ids: Tensor, positions: Tensor, longest: int, rows: Tensor | int = 0, num_logits: int | None = None
    ) -> tuple[Tensor, HiddenStates]:
        keep = {"logits_to_keep": num_logits} if num_logits and self._takes_logits_to_keep else {}
        if self._last_position is not None:  # positions after a text's last possible token do not count
            positions = positions.clamp_max(self._last_position)
        self.cache.place(rows, positions, longest)
        with self._attention():
            output = self.model(
                input_ids=token_ids,
                past_key_values=self.cache,
                use_cache=True,
                position_ids=positions,
                attention_mask=self._masks(positions, longest),
                output_hidden_states=bool(self.hidden_layers),
                **keep,
            )
        return output.logits, {layer: output.hidden_states[layer] for layer in self.hidden_layers}

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Select the attention of this class; one forward at a time, because the setting is the model's."""
        config = self.model.config
        with _switching:
            before = config._attn_implementation
            if self._grouped:
                config._attn_implementation = ATTENTION
            try:
                yield
            finally:
                config._attn_implementation = before

    def _masks(self, positions: Tensor, longest: int) -> Any:
        """Return masks [R, 1, n, longest]: each token attends to its own text up to itself, within the window."""
        distance = positions[:, None, :, None] - torch.arange(longest, device=positions.device)

        def mask(window: int | None) -> Tensor:
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            return visible if self._grouped else additive(visible, self.model.dtype)

        return masks_by_layer(mask, self._windows)


class _Graph:
    """A forward captured as a CUDA graph for one shape. Its outputs are overwritten by the next call."""

    def __init__(self, run: Callable[[Tensor, Tensor], Any], token_ids: Tensor, positions: Tensor, pool: Any) -> None:
        self._token_ids, self._positions = token_ids.clone(), positions.clone()
        with torch.cuda.device(token_ids.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # lazy initialisation must not be captured
                for _ in range(2):
                    run(self._token_ids, self._positions)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._output = run(self._token_ids, self._positions)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Any:
        self._token_ids.copy_(token_ids)
        self._positions.copy_(positions)
        with torch.cuda.device(token_ids.device):
            self._graph.replay()
        return self._output


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """`grouped_attention`, as transformers calls it."""
    return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def _of_similar_length(texts: Sequence[Unread]) -> list[list[Unread]]:
    """Group texts that differ by less than a factor of two in length, to pad little; the longest is first."""
    groups: list[list[Unread]] = []
    for text in sorted(texts, key=lambda text: len(text.token_ids), reverse=True):
        longest = len(groups[-1][0].token_ids) if groups else 0
        if not longest or 2 * len(text.token_ids) <= longest or longest * (len(groups[-1]) + 1) > _PREFILL_TOKENS:
            groups.append([])
        groups[-1].append(text)
    return groups


def _refuse_alibi(model: PreTrainedModel) -> None:
    """Refuse models that compute ALiBi biases from a padding mask, which rows do not have."""
    config = model.config.get_text_config()
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"{config.model_type} cannot run in batches, because its ALiBi biases are computed from a padding mask"
        )


def refuse_varying_positions(model: PreTrainedModel) -> None:
    """Refuse rotary positions that depend on the longest text of a batch.

    Raises:
        UnsupportedModelError: names the type.
    """
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    by_layer = [part for part in parameters.values() if isinstance(part, dict)]
    kinds = {part.get("rope_type") for part in (parameters, *by_layer)}
    if varying := [kind for kind in ("dynamic", "longrope") if kind in kinds]:
        raise UnsupportedModelError(
            f"{model.config.model_type} has {varying[0]} rotary positions, which depend on the longest text of a "
            "batch; use --engine local"
        )


AttentionInterface.register(ATTENTION, _attention)
