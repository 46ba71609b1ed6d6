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
from reprieve.files import read_json, replace_file
from reprieve.heads.files import require_free
from reprieve.models.eagle3 import EagleConfig, new_name

_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias",
    "mlp_bias", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range",
)  # fmt: skip

_NEEDED = ("fc.weight", "lm_head.weight", "norm.weight", "layers.0.self_attn.q_proj.weight")


def convert_safeailab(
    folder: Path, out: Path, *, target_name: str, layers: tuple[int, ...] = (), norm_before_residual: bool = False
) -> EagleConfig:
    """Write a SafeAILab checkpoint in the speculators format.

    Args:
        folder: holds `config.json` and the weights: safetensors or `pytorch_model.bin`, whole or in several files. Of
            the latter tensors alone are read: what would run code is refused.
        target_name: the model it drafts for.
        layers: target layers it reads, where they are not the published choice.
        norm_before_residual: as the head was trained; SafeAILab's are trained without.

    Raises:
        ReprieveError: not such a checkpoint, or a folder that holds something else.
    """
    if out.resolve() == folder.resolve():
        raise ReprieveError(f"--out must be another folder than the checkpoint's, got {str(out)!r}")
    require_free(out, "eagle3")
    try:
        published = read_json(folder / "config.json", "the file")
        tensors = {new_name(name): tensor for name, tensor in _read_tensors(folder).items()}
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ReprieveError(f"{str(folder)!r} cannot be read: {error}") from None
    if not isinstance(published, dict) or "speculators_model_type" in published:
        reason = (
            "is already in the speculators format"
            if isinstance(published, dict)
            else "has no JSON object in config.json"
        )
        raise ReprieveError(f"{str(folder)!r} {reason}")
    if lacking := [name for name in _NEEDED if name not in tensors]:
        raise ReprieveError(f"{str(folder)!r} must hold an EAGLE-3 head; its weights lack {lacking[0]}")
    document = _document(published, tensors, target_name, layers, norm_before_residual)
    try:
        config = EagleConfig.from_dict(json.loads(json.dumps(document)))
    except Exception as error:  # transformers checks configurations in many ways
        raise ReprieveError(f"{str(folder)!r}: config.json: {error}") from None
    try:
        replace_file(out / "model.safetensors", save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        replace_file(out / "config.json", json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise ReprieveError(f"{str(out)!r} cannot be written: {error.strerror}") from None
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name.

    Raises:
        ValueError: there are none, or a file holds more than tensors.
    """
    for name, read in (("model.safetensors", load_file), ("pytorch_model.bin", _read_bin)):
        paths = [folder / name] if (folder / name).is_file() else _shards(folder, name)
        if paths:
            return {key: tensor for path in paths for key, tensor in read(path).items()}
    raise ValueError("it holds neither model.safetensors nor pytorch_model.bin")


def _shards(folder: Path, name: str) -> list[Path]:
    """The files of a checkpoint in parts, inside its folder."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return []
    files = read_json(index, "the index")["weight_map"].values()
    return [folder / Path(file).name for file in dict.fromkeys(files)]


def _read_bin(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a foreign file holds
        raise ValueError(f"{path.name} holds something else than tensors: {str(error).splitlines()[0]}") from None
    if not isinstance(tensors, dict) or not all(isinstance(item, Tensor) for item in tensors.values()):
        raise ValueError(f"{path.name} must hold tensors by name")
    return tensors


def _document(
    published: dict[str, Any],
    tensors: dict[str, Tensor],
    target_name: str,
    layers: tuple[int, ...],
    norm_before_residual: bool,
) -> dict[str, Any]:
    draft_size = tensors["lm_head.weight"].shape[0]
    vocab_size = len(tensors["t2d"]) if "t2d" in tensors else draft_size
    tensors.setdefault("t2d", torch.ones(vocab_size, dtype=torch.bool))
    tensors.setdefault("d2t", torch.zeros(draft_size, dtype=torch.long))
    layer = {key: published[key] for key in _LAYER_KEYS if published.get(key) is not None}
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
