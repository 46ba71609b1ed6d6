"""Identity of a pair from its files alone, for engines that hold the models themselves."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from reprieve.bundles import source_of
from reprieve.errors import ReprieveError, SpecError
from reprieve.files import read_json
from reprieve.identity import PairIdentity, tokenizer_fingerprint
from reprieve.models.int8 import INT8
from reprieve.models.loading import (
    GGUF,
    NUM_VALUES,
    fingerprint_of,
    load_tokenizer,
    parameter_names,
    require_same_tokenizer,
)
from reprieve.settings import PairSettings

_ANY = 10**9  # positions of a model without a limit
_ENGINES = "--engine local (or batched, for bench, certify and monitor)"
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def model_folder(name: str, role: str) -> Path:
    """Return the folder of a model's files; models on the hub are downloaded.

    Raises:
        ReprieveError: not found.
    """
    folder = Path(source_of(name, role))
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the hub raises many types
        raise ReprieveError(f"could not find the {role} {name!r}: {error}") from error


def stored_identity(settings: PairSettings) -> tuple[PairIdentity, Any, str]:
    """Return a pair's identity, its tokenizer and the name of its dtype, without loading a model.

    Raises:
        ReprieveError: a model that cannot be found or read.
        PairError: the two do not share a tokenizer.
        SpecError: a precision or a file format that servers do not read.
    """
    draft = settings.draft_source
    if settings.dtype == INT8:
        raise SpecError(f"dtype int8 requires {_ENGINES}; servers quantise by their own flags")
    for name in filter(None, (settings.target, draft)):
        if Path(name).suffix == GGUF:
            raise SpecError(f"GGUF files require {_ENGINES}, got {name!r}")
    folder = model_folder(settings.target, "target")
    tokenizer = load_tokenizer(settings.target)
    draft_weights = None
    if draft is not None:
        draft_folder = model_folder(draft, "draft")
        require_same_tokenizer(tokenizer, load_tokenizer(str(draft_folder)), settings.target, draft)
        draft_weights = stored_fingerprint(draft_folder)
    identity = PairIdentity(
        target=settings.target,
        draft=draft,
        target_weights=stored_fingerprint(folder),
        draft_weights=draft_weights,
        tokenizer=tokenizer_fingerprint(tokenizer.get_vocab()),
    )
    return identity, tokenizer, settings.dtype if settings.dtype != "auto" else _dtype_of(folder)


def stored_generation(target: str) -> GenerationConfig:
    """Return the generation configuration in a target's files, which names its end-of-text tokens.

    Raises:
        ReprieveError: a model that cannot be found.
    """
    folder = model_folder(target, "target")
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:  # the folder has none
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))


def stored_positions(settings: PairSettings) -> int:
    """Return the number of tokens that both models of a pair can read.

    Raises:
        ReprieveError: a model that cannot be found.
    """
    folders = [model_folder(settings.target, "target")]
    if settings.draft_source is not None:
        folders.append(model_folder(settings.draft_source, "draft"))
    configs = [AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config() for folder in folders]
    return min(int(getattr(config, "max_position_embeddings", None) or _ANY) for config in configs)


def stored_fingerprint(folder: Path) -> str:
    """Return the `weights_fingerprint` of the model in a folder, from its safetensors files.

    Raises:
        ReprieveError: no such files, or they lack a weight.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return fingerprint_of(_read_first(folder, parameter_names(config), config.get_text_config().model_type))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ReprieveError(f"the weights in {str(folder)!r} cannot be read without loading them: {error}") from None


def _read_first(folder: Path, names: list[str], model_type: str) -> Iterator[torch.Tensor]:
    """Yield the first values of each of these weights, flattened."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files: dict[str, str] = read_json(index, "the index")["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", framework="pt") as opened:
            files = dict.fromkeys(opened.keys(), "model.safetensors")
    changes = get_checkpoint_conversion_mapping(model_type) or []
    for name in names:
        stored = _stored_first(name, changes, files)
        with safe_open(folder / files[stored], framework="pt") as opened:
            part = opened.get_slice(stored)
            shape = part.get_shape()
            if len(shape) > 1:  # read only the rows that hold them
                yield part[: -(-NUM_VALUES // max(1, math.prod(shape[1:])))].flatten()
            else:
                yield opened.get_tensor(stored).flatten()


def _stored_first(name: str, changes: Iterable[Any], stored: Container[str]) -> str:
    """Return the stored weight that a parameter begins with; experts stacked in memory are separate in the files.

    Args:
        changes: transformers' conversions of stored weights for this model type; empty if unknown.
    """
    found = [name]
    for change in changes:
        steps = [type(step).__name__ for step in getattr(change, "operations", None) or ()]
        if steps not in ([], ["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            continue  # transposed or interleaved: other values come first
        first, merged = change.source_patterns[0].replace("*", "0"), change.target_patterns[0]
        found += [one.replace(merged, first) for one in found if merged in one]
    return next((one for one in found if one in stored), name)


def _dtype_of(folder: Path) -> str:
    """Return the dtype that transformers' `auto` selects."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return str(getattr(config.get_text_config(), "dtype", None) or torch.float32).removeprefix("torch.")
