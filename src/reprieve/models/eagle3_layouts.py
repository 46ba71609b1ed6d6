"""SafeAILab's EAGLE-3 checkpoints into the speculators format: other names, the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from reprieve.errors import ReprieveError
from reprieve.files import replace_file
from reprieve.models.eagle3 import OLD_NAMES, EagleConfig

_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias",
    "mlp_bias", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range",
)  # fmt: skip


def convert_safeailab(
    folder: Path, out: Path, *, target_name: str, layers: tuple[int, ...] = (), norm_before_residual: bool = False
) -> EagleConfig:
    """Write a SafeAILab checkpoint in the speculators format.

    Args:
        folder: holds `config.json` and `model.safetensors`. Their repositories hold `pytorch_model.bin`, which runs
            code when it is read; turn that into safetensors first, where you trust it.
        target_name: the model it drafts for.
        layers: target layers it reads, where they are not the published choice.
        norm_before_residual: as the head was trained; SafeAILab's are trained without.

    Raises:
        ReprieveError: not such a checkpoint, or a folder that holds something else.
    """
    if not (folder / "model.safetensors").is_file():
        told = "only pytorch_model.bin, which can run code and is never read here: convert it to safetensors first"
        found = told if (folder / "pytorch_model.bin").is_file() else "none"
        raise ReprieveError(f"{str(folder)!r} must hold model.safetensors, got {found}")
    if out.resolve() == folder.resolve():
        raise ReprieveError(f"--out must be another folder than the checkpoint's, got {str(out)!r}")
    try:
        found_config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ReprieveError(f"{str(folder)!r} cannot be read: {error}") from None
    if "speculators_model_type" in found_config:
        raise ReprieveError(f"{str(folder)!r} is in the speculators format already")
    if not any(name.startswith("midlayer.") for name in tensors) or "fc.weight" not in tensors:
        raise ReprieveError(f"{str(folder)!r} must hold an EAGLE-3 head (fc.weight and midlayer.*), got others")
    named = {_new_name(name): tensor for name, tensor in tensors.items()}
    document = _document(found_config, named, target_name, layers, norm_before_residual)
    config = EagleConfig.from_dict(json.loads(json.dumps(document)))
    replace_file(out / "model.safetensors", save({name: tensor.contiguous() for name, tensor in named.items()}))
    replace_file(out / "config.json", json.dumps(document, indent=2) + "\n")
    return config


def _new_name(name: str) -> str:
    for old, new in OLD_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _document(
    found: dict[str, Any],
    tensors: dict[str, Tensor],
    target_name: str,
    layers: tuple[int, ...],
    norm_before_residual: bool,
) -> dict[str, Any]:
    draft_size = tensors["lm_head.weight"].shape[0]
    vocab_size = len(tensors["t2d"]) if "t2d" in tensors else draft_size
    tensors.setdefault("t2d", torch.ones(vocab_size, dtype=torch.bool))
    tensors.setdefault("d2t", torch.zeros(draft_size, dtype=torch.long))
    layer = {key: found[key] for key in _LAYER_KEYS if found.get(key) is not None}
    layer |= {"model_type": "llama", "vocab_size": vocab_size, "num_hidden_layers": 1, "tie_word_embeddings": False}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft_size,
        "norm_before_residual": norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(layers) or None,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
    }
