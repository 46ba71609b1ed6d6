"""EAGLE-3 heads in the speculators format: loading and forward (arXiv 2503.01840).

The speculators library trains these heads but cannot draft with them: its model has no cache and unrolls whole texts.
This model runs token by token, on a tree or a chain, and does not need that library.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from reprieve.errors import PairError, ReprieveError, require_whole
from reprieve.files import read_file, read_json
from reprieve.heads.files import find_head
from reprieve.heads.settings import default_layers
from reprieve.identity import PairIdentity, digest
from reprieve.models.attention import additive, without_cudnn
from reprieve.models.cache import RollbackCache
from reprieve.types import HiddenStates

_PARTS: dict[str, tuple[type[PretrainedConfig], Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
_LARGEST = 1 << 34  # bytes of a head
_OLD_NAME = re.compile(r"^midlayer\.")  # SafeAILab's for the one layer


@dataclass(frozen=True)
class EagleConfig:
    """Contents of a head's `config.json`.

    Args:
        layer: configuration of its decoder layers; `vocab_size` is the target's.
        layers: target layers it reads; () if they follow from the target's depth.
    """

    layer: PretrainedConfig
    layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> EagleConfig:
        """Parse the speculators format.

        Raises:
            ReprieveError: another format, or an unknown kind of layer.
        """
        if not isinstance(config, dict):
            raise ReprieveError(f"config.json must hold an object, got {type(config).__name__}")
        if config.get("speculators_model_type") != "eagle3":
            raise ReprieveError(
                "must be an EAGLE-3 head in the speculators format (speculators_model_type: eagle3), got "
                f"{config.get('speculators_model_type') or config.get('model_type')!r}; `speculators convert "
                "--algorithm eagle3` converts SafeAILab's layout"
            )
        layer = dict(config["transformer_layer_config"])
        kind = layer.pop("model_type", "llama")
        if kind not in _PARTS:
            raise ReprieveError(f"model_type of its layers must be one of {', '.join(_PARTS)}, got {kind!r}")
        require_whole("draft_vocab_size", config["draft_vocab_size"], 1)
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return cls(
            layer=_PARTS[kind][0](**layer),
            layers=tuple(int(layer) for layer in config.get("eagle_aux_hidden_state_layer_ids") or ()),
            draft_vocab_size=config["draft_vocab_size"],
            **{flag: bool(config.get(flag, False)) for flag in flags},
        )


class EagleHead(nn.Module):
    """EAGLE-3 head: fuses three hidden layers of the target, embeds a token, and predicts the next one.

    Args:
        config: its shape.
        num_target_layers: depth of the target, for the published choice of layers.
        target_size: the target's hidden size.
    """

    d2t: Tensor
    fingerprint = ""  # of its weights file

    def __init__(self, config: EagleConfig, *, num_target_layers: int, target_size: int) -> None:
        super().__init__()
        self.config = config
        self.layers_read = config.layers or default_layers(num_target_layers)
        layer = config.layer
        _, layer_class, norm, rotary = _PARTS[layer.model_type]
        layer._attn_implementation = "sdpa"
        size, width = layer.hidden_size, len(self.layers_read) * target_size
        self.embed_tokens = nn.Embedding(layer.vocab_size, size)
        self.input_norm = norm(width, eps=layer.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(norm(target_size, eps=layer.rms_norm_eps) for _ in self.layers_read)
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(width, size, bias=False)
        self.layers = nn.ModuleList(layer_class(layer, index) for index in range(layer.num_hidden_layers))
        first: Any = self.layers[0]
        first.hidden_norm = norm(size, eps=layer.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):  # the first layer reads a token and a state, concatenated
            old = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * size, old.out_features, bias=old.bias is not None))
        self.norm = norm(size, eps=layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.rotary = rotary(layer)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert the module, but keep the rotary frequencies in float32.

        In bfloat16 they are off by up to 0.4%, which is two radians by position 1,000 at Llama 3.1's base.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in type(self.rotary)(self.config.layer).named_buffers():
            setattr(self.rotary, name, buffer.to(self.d2t.device))
        return self

    @property
    def target_ids(self) -> Tensor:
        """Target ids of all draft tokens, [draft_vocab_size]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def whole_vocabulary(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Spread logits [n, draft_vocab_size] over the target's vocabulary, [n, vocab_size]; -inf for other tokens."""
        whole = torch.full((len(logits), vocab_size), -math.inf, device=logits.device)
        whole[:, self.target_ids] = logits
        return whole

    def fuse(self, hidden: HiddenStates) -> Tensor:
        """Fuse the target's states [..., Dt] of all layers read into one state [..., D]."""
        states = [hidden[layer].to(self.fc.weight) for layer in self.layers_read]
        if self.fc_norm is not None:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, dim=-1)
        fused: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return fused

    def read(
        self,
        token_ids: Tensor,  # [n], int64: consecutive tokens of a text, as target ids
        states: Tensor,  # [n, D], fused, of the token before each
        *,
        cache: RollbackCache,
        num_cached: int,
    ) -> tuple[Tensor, Tensor]:  # logits [n, draft_vocab_size], float32; states [n, D]
        """Append tokens of a text to the cache, with causal attention."""
        num, device, mask = len(token_ids), token_ids.device, None
        if num > 1:
            seen = torch.ones(num, num_cached + num, dtype=torch.bool, device=device).tril(num_cached)
            mask = self.additive_mask(seen)
        positions = torch.arange(num_cached, num_cached + num, device=device)
        logits, states = self(token_ids, states, cache=cache, positions=positions, mask=mask)
        return logits, states

    def additive_mask(self, visible: Tensor) -> Tensor:
        """Return the additive mask for `forward` from a bool mask, True where a token is visible.

        Args:
            visible: [n, columns], or [R, n, columns] for R texts.
        """
        return additive(visible, self.fc.weight.dtype).reshape(-1, 1, *visible.shape[-2:])

    def forward(
        self,
        token_ids: Tensor,  # [n], int64, target ids; or [R, n] for R texts, as in all that follows
        states: Tensor,  # [n, D]: fused, or the head's own, of the token before each
        *,
        cache: Cache,
        positions: Tensor,  # [n]
        mask: Tensor | None,  # [1, 1, n, cached + n], additive; None for a single token that sees everything
    ) -> tuple[Tensor, Tensor]:  # logits [n, draft_vocab_size], float32; states [n, D] for the next step
        if token_ids.dim() == 1:
            logits, own = self(token_ids[None], states[None], cache=cache, positions=positions[None], mask=mask)
            return logits[0], own[0]
        embeds = self.embed_tokens(token_ids)
        hidden = states
        extra = {
            "attention_mask": mask,
            "past_key_values": cache,
            "position_embeddings": self.rotary(hidden, positions),
        }
        first: Any = self.layers[0]
        normed = first.hidden_norm(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        with without_cudnn(hidden.device):
            first_input = torch.cat([first.input_layernorm(embeds), normed], dim=-1)
            mixed, _ = first.self_attn(hidden_states=first_input, **extra)
            hidden = residual + mixed
            hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
            for layer in self.layers[1:]:
                hidden = layer(hidden, **extra)
        normed = self.norm(hidden)
        return self.lm_head(normed).float(), normed if self.config.norm_output else hidden


def load_eagle3(source: str | Path, target: Any, *, identity: PairIdentity | None = None) -> EagleHead:
    """Load a head from a folder or a hub id, on the target's device and in its dtype.

    Warns if the head was trained for other weights, such as the target before it was quantised. Lossless answers do not
    depend on the head; under a relaxed rule, the rescued tokens and so the accuracy do.

    Args:
        target: the `transformers` model it drafts for; its token embedding is used if the file has none.
        identity: of the current pair, for heads that record their target (ours do).

    Raises:
        ReprieveError: not found, unreadable, or in another format.
        PairError: made for another tokenizer, or for a target of other sizes.
    """
    folder = find_head(source)
    what = f"EAGLE-3 head {str(source)!r}"
    text = target.config.get_text_config()
    embedding = target.get_input_embeddings().weight
    try:
        config = EagleConfig.from_dict(read_json(folder / "config.json", "the file"))
        content = read_file(folder / "model.safetensors", "the file", most=_LARGEST)
        tensors = {_OLD_NAME.sub("layers.0.", name): tensor for name, tensor in load(content).items()}
        head = EagleHead(config, num_target_layers=text.num_hidden_layers, target_size=text.hidden_size)
        made_for = _made_for(folder)
    except ReprieveError as error:
        raise ReprieveError(f"{what} cannot be read: {error}") from None
    except Exception as error:  # a third-party file can hold anything
        raise ReprieveError(f"{what} cannot be read: {type(error).__name__}: {error}") from None
    if made_for is not None and identity is not None:
        different = made_for.differences(identity, reads_draft=False)
        if "tokenizer" in different:
            made_for.require_matches(identity, what, reads_draft=False)
        elif different:
            warnings.warn(
                f"{what} was trained for target {made_for.target!r} with other weights ({made_for.target_weights}, not "
                f"{identity.target_weights}): it can draft worse, and relaxed rules can rescue other tokens",
                stacklevel=2,
            )
    tensors.setdefault("embed_tokens.weight", embedding.detach().cpu())
    _require_fit(what, head, tensors, embedding.shape[0], text)
    head.load_state_dict({name: tensors[name] for name in head.state_dict()})
    head.fingerprint = digest(content)
    return head.to(device=embedding.device, dtype=embedding.dtype).eval()


def _made_for(folder: Path) -> PairIdentity | None:
    """Return the pair that our training recorded in a head's folder; None for other heads, which lack the file."""
    path = folder / "training.json"
    return PairIdentity(**read_json(path, "the file")["pair"]) if path.is_file() else None


def _require_fit(what: str, head: EagleHead, tensors: dict[str, Tensor], vocab_size: int, text: Any) -> None:
    if head.config.draft_vocab_size == vocab_size:
        tensors.setdefault("d2t", head.d2t)
    wanted = {name: tensor.shape for name, tensor in head.state_dict().items()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise ReprieveError(f"{what}: model.safetensors lacks {name}")
        if tensors[name].shape != shape:
            raise PairError(
                f"{what}: {name} must have shape {list(shape)} for this target ({text.num_hidden_layers} layers of "
                f"{text.hidden_size}), got {list(tensors[name].shape)}"
            )
    if tensors["embed_tokens.weight"].shape[0] != vocab_size:
        raise PairError(
            f"{what} was made for {tensors['embed_tokens.weight'].shape[0]} tokens, the target has {vocab_size}"
        )
    if min(head.layers_read) < 0 or max(head.layers_read) > text.num_hidden_layers:
        raise PairError(f"{what} reads layers {head.layers_read}, the target has {text.num_hidden_layers}")
    for name in wanted:
        if name != "d2t" and not (tensors[name].is_floating_point() and bool(tensors[name].isfinite().all())):
            raise ReprieveError(f"{what}: {name} must be finite numbers")
    if tensors["d2t"].is_floating_point():
        raise ReprieveError(f"{what}: d2t must be whole numbers, got {tensors['d2t'].dtype}")
    ids = torch.arange(head.config.draft_vocab_size) + tensors["d2t"]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise PairError(f"{what}: d2t names tokens {int(ids.min())} to {int(ids.max())}, the target has {vocab_size}")
