"""Hand-written forward for the Llama family: the same results as transformers', with less Python overhead.

A small model's step spends more time in Python than in arithmetic: nested modules, masks and positions rebuilt at each
step, one cache call per layer. Here, everything that is constant during a forward is computed once. Other families, and
models with hooks, quantised weights or sliding windows, run through transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from reprieve.models.attention import grouped_attention, layer_windows
from reprieve.models.cache import capacity_for
from reprieve.models.int8 import is_int8

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROTARY = ("default", "linear", "llama3", "yarn")  # types with fixed frequencies
_CAPTURING = "transformers.utils.output_capturing"  # the library's hooks for hidden states
_AGREES: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def supports(model: PreTrainedModel) -> bool:
    """Return True if a model can run directly: a known family, unmodified, with verified equal results."""
    if not _is_plain(model):  # checked each time: hooks and adapters can be added later
        return False
    if model not in _AGREES:
        _AGREES[model] = _agrees(model)
    return _AGREES[model]


def _is_plain(model: PreTrainedModel) -> bool:
    config = model.config
    if type(model).__name__ not in FAMILIES or getattr(config, "quantization_config", None) is not None:
        return False
    if layer_windows(model) is not None:
        return False
    if config.rope_parameters.get("rope_type", "default") not in _ROTARY or config.hidden_act != "silu":
        return False
    if "forward" in vars(model):  # forward was replaced
        return False
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if hasattr(module, "_hf_hook") or any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
            return False
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return False
    return len({parameter.device for parameter in model.parameters()}) == 1


@torch.inference_mode()
def _agrees(model: PreTrainedModel) -> bool:
    """Return True if two steps match the library's result, in case the family changed."""
    token_ids = torch.arange(7, device=model.device) * 31 % model.config.vocab_size
    try:
        direct = DirectModel(model)
        steps = [direct(token_ids[:5])[0], direct(token_ids[5:])[0]]
    except (AttributeError, TypeError, RuntimeError):  # another release may structure the family differently
        return False
    expected = model(input_ids=token_ids[None], use_cache=False).logits[0]
    # int8 layers round activations: one float32 bit of difference can become one step of 13 bits.
    tolerance = 1e-3 if expected.dtype == torch.float32 and not is_int8(model) else 0.05
    largest = expected.abs().amax().item()
    return bool((torch.cat(steps) - expected).abs().amax() <= tolerance * max(largest, 1e-6))


class DirectCache:
    """Keys and values of all layers in one buffer [layers, 2, heads, capacity, head_dim] that doubles when full."""

    def __init__(self) -> None:
        self.length = 0
        self.buffer: Tensor | None = None

    def truncate(self, length: int) -> None:
        """Drop everything after the first `length` tokens."""
        self.length = min(length, self.length)

    def keep_path(self, start: int, rows: Tensor) -> None:
        """Keep the first `start` tokens and, after them, those at `start + rows`."""
        assert self.buffer is not None
        end = start + len(rows)
        self.buffer[..., start:end, :] = self.buffer.index_select(-2, start + rows)
        self.length = end

    def reserve(self, needed: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return the buffer with space for `needed` tokens; `shape` is (layers, heads, head_dim)."""
        if self.buffer is None or needed > self.buffer.shape[-2]:
            layers, heads, head_dim = shape
            grown = torch.zeros(layers, 2, heads, capacity_for(needed), head_dim, dtype=like.dtype, device=like.device)
            if self.buffer is not None:
                grown[..., : self.length, :] = self.buffer[..., : self.length, :]
            self.buffer = grown
        return self.buffer


class DirectModel:
    """One model and one sequence; the weights are the model's own, not copies.

    Args:
        model: one that `supports` accepts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.cache = DirectCache()
        config, inner = model.config, model.model
        self._embedding: Tensor = inner.embed_tokens.weight
        self._rotary = inner.rotary_emb
        self._layers = [_Layer(layer) for layer in inner.layers]
        self._norm, self._eps = inner.norm.weight, inner.norm.variance_epsilon
        self._head: nn.Linear = model.lm_head
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = self._layers[0].attention.head_dim
        self._grouped = self._num_heads != self._num_kv_heads
        self._folds = self._embedding.is_cuda  # fused kernels there take either a mask or grouped heads
        self._cos_sin: tuple[Tensor, Tensor] | None = None  # cosines and sines of all positions so far

    def __call__(
        self,
        token_ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        num_logits: int | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Append tokens [n]; return logits [num_logits, V] after the last of them, and hidden states [n, D] by layer.

        Args:
            positions: of the tokens, [n]; None for consecutive ones.
            mask: additive, [1, 1, n, cached + n]; None for causal attention.
            num_logits: number of rows to return; None for all.
            hidden_layers: as transformers numbers them.
        """
        start, num = self.cache.length, len(token_ids)
        end = start + num
        x = F.embedding(token_ids, self._embedding)
        buffer = self.cache.reserve(end, (len(self._layers), self._num_kv_heads, self._head_dim), x)
        cos, sin = self._rotations(x, start, end) if positions is None else self._rotations_at(x, positions)
        if mask is None and num > 1 and start:
            mask = torch.ones(num, end, dtype=torch.bool, device=x.device).tril_(start)
        causal = mask is None and num > 1
        wanted = {layer % (len(self._layers) + 1) for layer in hidden_layers}
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in wanted:
                states[index] = x
            x = x + self._attend(layer, x, buffer[index], (start, end), (cos, sin), mask, causal)
            y = _rms_norm(x, layer.after.weight, self._eps)
            x = x + layer.down(F.silu(layer.gate(y)) * layer.up(y))
        x = _rms_norm(x, self._norm, self._eps)
        states[len(self._layers)] = x
        self.cache.length = end  # last, because an interrupted forward must not count
        rows = x if num_logits is None else x[num - num_logits :]
        return self._head(rows), {layer: states[layer % (len(self._layers) + 1)] for layer in hidden_layers}

    def _attend(
        self,
        layer: _Layer,
        x: Tensor,
        cached: Tensor,
        span: tuple[int, int],
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        start, end = span
        num = end - start
        y = _rms_norm(x, layer.before.weight, self._eps)
        queries = layer.query(y).view(num, self._num_heads, self._head_dim)
        keys = layer.key(y).view(num, self._num_kv_heads, self._head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = _rms_norm(queries, layer.query_norm.weight, self._eps)
            keys = _rms_norm(keys, layer.key_norm.weight, self._eps)
        cached[0, :, start:end] = _apply_rotary(keys, turns).transpose(0, 1)
        cached[1, :, start:end] = layer.value(y).view(num, self._num_kv_heads, self._head_dim).transpose(0, 1)
        read = _apply_rotary(queries, turns).transpose(0, 1)[None], cached[None, 0, :, :end], cached[None, 1, :, :end]
        if mask is not None and self._folds:
            attended = grouped_attention(*read, mask[(None,) * (4 - mask.dim())])
        else:
            attended = F.scaled_dot_product_attention(*read, attn_mask=mask, is_causal=causal, enable_gqa=self._grouped)
        out: Tensor = layer.out(attended[0].transpose(0, 1).reshape(num, -1))
        return out

    def _rotations(self, x: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        if self._cos_sin is None or end > len(self._cos_sin[0]):
            self._cos_sin = self._rotations_at(x, torch.arange(capacity_for(end), device=x.device))
        cos, sin = self._cos_sin
        return cos[start:end], sin[start:end]

    def _rotations_at(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [n, 1, head_dim]; the first half of the sines is negated for the rotation."""
        cos, sin = self._rotary(x, position_ids=positions[None])
        sin = sin[0].clone()
        sin[:, : self._head_dim // 2] *= -1
        return cos[0][:, None], sin[:, None]


class _Layer:
    """Modules of a decoder layer, by function."""

    def __init__(self, layer: Any) -> None:
        self.attention, mlp = layer.self_attn, layer.mlp
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.query, self.key = self.attention.q_proj, self.attention.k_proj
        self.value, self.out = self.attention.v_proj, self.attention.o_proj
        self.query_norm = getattr(self.attention, "q_norm", None)
        self.key_norm = getattr(self.attention, "k_norm", None)
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm as the library does; PyTorch's own is one kernel on a GPU, but ten operations on a CPU."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return weight * (wide * scale).to(x.dtype)


def _apply_rotary(states: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to [n, heads, head_dim]."""
    cos, sin = turns
    return states * cos + states.roll(states.shape[-1] // 2, -1) * sin
