"""Causal language model with its cache; engine and drafters run all forwards through it."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.errors import ContextOverflowError, UnsupportedModelError
from reprieve.models.attention import layer_windows, masks_by_layer, tree_mask, without_cudnn
from reprieve.models.cache import RollbackCache
from reprieve.models.direct import DirectCache, DirectModel, supports
from reprieve.transfers import device_tensor, to_device
from reprieve.types import ROOT, Block, HiddenStates, Prefill, select_rows

_UNKNOWN = -1  # cached token whose id the host does not know
HiddenLayers = tuple[int, ...]  # indices into transformers' `hidden_states`; -1 is the last, after the final norm


class CachedModel:
    """One model, one sequence, one cache. Batch size 1.

    Args:
        model: any `transformers` causal language model with a key-value cache.
        vocab_size: number of columns of the logits, cut or padded with -inf. Models of one family pad their
            vocabularies differently, so a draft's logits are matched to its target's. None leaves them unchanged.
        hidden_layers: layers whose hidden states `forward` returns; () for none.
        direct: run families that `models.direct` supports without the library's layers.

    Raises:
        UnsupportedModelError: a model with recurrent state, which cannot be rolled back, or without a requested layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        hidden_layers: HiddenLayers = (),
        direct: bool = True,
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.hidden_layers = hidden_layers
        self.cached_ids: list[int] = []
        self._shared_ids: list[int] = []
        self._holds_shared = False
        self._config = model.config.get_text_config()
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        refuse_recurrent(model)
        num_states = self._config.num_hidden_layers + 1
        for layer in hidden_layers:
            if not -num_states <= layer < num_states:
                raise UnsupportedModelError(
                    f"hidden layer must be in [-{num_states}, {num_states - 1}] for {model.config.name_or_path!r} "
                    f"({num_states - 1} layers), got {layer}"
                )
        self._direct = DirectModel(model) if direct and supports(model) else None
        self.cache: DirectCache | RollbackCache = RollbackCache() if self._direct is None else self._direct.cache

    @property
    def device(self) -> torch.device:
        return execution_device(self.model)

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return len(self.cached_ids)

    def start(self, token_ids: Sequence[int], *, reuse_prefix: bool = False) -> Prefill:
        """Prefill: cache exactly these tokens.

        Args:
            reuse_prefix: keep the common prefix in the cache; hidden states are then returned for the rest only.
        """
        shared = 0
        if reuse_prefix:
            shared = shared_length(token_ids, self.cached_ids)
        self.truncate(shared)
        if shared == len(token_ids):
            return Prefill()
        logits, hidden = self._run(list(token_ids[shared:]), num_logits=1)
        return Prefill(logits[-1].float(), hidden)

    def share_prefix(self, token_ids: Sequence[int]) -> None:
        """Set a prefix that most texts share: `restart` reads it once."""
        self.truncate(0)
        self._shared_ids = list(token_ids)

    def restart(self, token_ids: Sequence[int]) -> list[int]:
        """Roll back for a new text; return the tokens left to read, 1 or more.

        A shared prefix is always read by a forward of its own, so answers do not depend on earlier texts.
        """
        size = len(self._shared_ids)
        if not 0 < size < len(token_ids) or list(token_ids[:size]) != self._shared_ids:
            size = 0
        elif not self._holds_shared:
            self.start(self._shared_ids)
            self._holds_shared = True
        self.truncate(size)
        return list(token_ids[size:])

    def forward(
        self, token_ids: Sequence[int] | Tensor, block: Block | None = None, *, num_rows: int | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        """Append tokens; return the logits [n, V] after each and, on request, hidden states [n, D] by layer.

        Args:
            token_ids: n tokens; with a tree, the last committed token and then the block's. A tensor [n] on the model's
                device is not copied to the host, so `cached_ids` holds -1 for its tokens.
            block: gives the tree's shape; None, or a chain, for causal attention.
            num_rows: return the last rows only; None for all.
        """
        tree = None if block is None or block.is_chain else block
        logits, hidden = self._run(token_ids, num_logits=num_rows, tree=tree)
        if num_rows is not None:
            hidden = select_rows(hidden, slice(len(token_ids) - num_rows, None))
        logits = logits.float()  # probabilities in half precision do not sum to 1
        return logits if self.vocab_size is None else same_vocabulary(logits, self.vocab_size), hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input embedding of each token, [...] to [..., D], tied to the output or not."""
        embeddings: Tensor = self.model.get_input_embeddings()(token_ids)
        return embeddings

    def record_ids(self, start: int, token_ids: Sequence[int]) -> None:
        """Record the ids of the cached tokens from `start` on, once the host knows them."""
        known = token_ids[: self.length - start]
        self.cached_ids[start : start + len(known)] = known

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens."""
        self.cache.truncate(length)
        del self.cached_ids[length:]
        self._holds_shared = self._holds_shared and length >= len(self._shared_ids)

    def keep_path(self, start: int, rows: list[int]) -> None:
        """Keep the first `start` tokens and, of those after them, the given rows (increasing)."""
        if rows == list(range(len(rows))):
            self.truncate(start + len(rows))
            return
        self.cache.keep_path(start, to_device(torch.tensor(rows), self.device))
        self.cached_ids[start:] = [self.cached_ids[start + row] for row in rows]

    def _run(
        self, token_ids: Sequence[int] | Tensor, *, num_logits: int | None, tree: Block | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        if isinstance(token_ids, Tensor):
            input_ids, known = token_ids, [_UNKNOWN] * len(token_ids)
        else:
            input_ids, known = device_tensor(list(token_ids), torch.long, self.device), list(token_ids)
        positions, masks = (None, None) if tree is None else self._tree_arguments(tree)
        with without_cudnn(self.device):
            if self._direct is not None:
                logits, states = self._direct(
                    input_ids, positions=positions, mask=masks, num_logits=num_logits, hidden_layers=self.hidden_layers
                )
            else:
                logits, states = self._run_library(input_ids, positions, masks, num_logits)
        self.cached_ids += known  # last, because an interrupted forward must not count
        return logits, states or None

    def _run_library(
        self, input_ids: Tensor, positions: Tensor | None, masks: Any, num_logits: int | None
    ) -> tuple[Tensor, HiddenStates]:
        extra: dict[str, Any] = {}
        if num_logits is not None and self._takes_logits_to_keep:
            extra["logits_to_keep"] = num_logits
        if positions is not None:
            extra |= {"attention_mask": masks, "position_ids": positions[None]}
        if self.hidden_layers:
            extra["output_hidden_states"] = True
        output = self.model(input_ids=input_ids[None], past_key_values=self.cache, use_cache=True, **extra)
        logits = output.logits[0] if num_logits is None else output.logits[0, -num_logits:]
        return logits, {layer: output.hidden_states[layer][0] for layer in self.hidden_layers}

    def _tree_arguments(self, block: Block) -> tuple[Tensor, Any]:
        """Return positions of a tree's tokens, and one mask, or one per kind of layer."""
        positions = device_tensor([self.length + depth for depth in (0, *block.depths)], torch.long, self.device)
        windows = layer_windows(self.model)

        def mask(size: int | None) -> Tensor:
            return tree_mask(
                block.parents, num_cached=self.length, dtype=self.model.dtype, device=self.device, window=size
            )

        return positions, masks_by_layer(mask, windows)


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


@torch.inference_mode()
def forward_seconds(model: CachedModel, num_tokens: int, *, num_cached: int = 64) -> float:
    """Return the seconds of a forward over some tokens; the tokens before them stay cached for the next call."""
    model.start([0] * num_cached, reuse_prefix=True)
    started = time.perf_counter()
    logits, _ = model.forward([0] * num_tokens)
    float(logits[-1, 0])  # on a GPU, wait for it
    seconds = time.perf_counter() - started
    model.truncate(num_cached)
    return seconds


@dataclass(frozen=True)
class StepCosts:
    """Costs of a round beyond one target forward, in target forwards over one token.

    Args:
        draft: of a drafted token, or of a level of a tree.
        verify: of verifying one more token.
    """

    draft: float
    verify: float


_TRIALS = 3
_READ, _BLOCK = 16, 5  # tokens before a trial's forward, and of a verification


def measure_forwards(target: CachedModel, draft: CachedModel | None) -> StepCosts:
    """Measure forwards in turns, and take the shortest of each kind. Without a draft, drafting costs nothing."""
    kinds = [(target, 1), (target, _BLOCK), *([] if draft is None else [(draft, 1)])]
    rounds = [[forward_seconds(model, size, num_cached=_READ) for model, size in kinds] for _ in range(1 + _TRIALS)]
    one, block, *drafting = (min(times) for times in zip(*rounds[1:], strict=True))  # the first round warms up
    return StepCosts(sum(drafting) / one, max(0.0, block / one - 1) / (_BLOCK - 1))


def same_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits [..., any] cut or padded with -inf to [..., V]: families pad their vocabularies differently."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf) if missing else logits


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-text tokens of the model's generation configuration and of the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = []
    ids = set(configured if isinstance(configured, list) else [configured])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def shared_length(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts, in tokens."""
    limit = min(len(tokens), len(others))
    return next((i for i in range(limit) if tokens[i] != others[i]), limit)


def execution_device(model: PreTrainedModel) -> torch.device:
    """Return the device that runs forwards; accelerate may store the weights elsewhere."""
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "meta"))


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the longest text that a model can read, in tokens; None if its configuration does not say."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def require_positions(model: PreTrainedModel, num_tokens: int, *, what: str) -> None:
    """Refuse texts longer than the model's positions.

    Raises:
        ContextOverflowError: names the model, its limit and the requested length.
    """
    limit = max_positions(model)
    if limit is not None and num_tokens > limit:
        raise ContextOverflowError(
            f"{what} need {num_tokens} positions, but {model.config.name_or_path or 'the model'} "
            f"has {limit}; shorten the prompt or lower max_new_tokens"
        )


def refuse_recurrent(model: PreTrainedModel) -> None:
    """Refuse models whose caches hold more than keys and values.

    Raises:
        UnsupportedModelError: names the kind of layer.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    unsupported = sorted(kinds - {"full_attention", "sliding_attention"})
    if unsupported or getattr(model, "_is_stateful", False) or hasattr(config, "state_size"):
        what = f"layers of kind {', '.join(unsupported)}" if unsupported else "recurrent state"
        raise UnsupportedModelError(
            f"{config.model_type} has {what}, which cannot be rolled back; speculative decoding needs full_attention "
            "or sliding_attention layers throughout"
        )
