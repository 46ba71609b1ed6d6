"""Head folders: `config.json` and `model.safetensors`, checked against each other, and certificates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from reprieve.bundles import BUNDLED_HEADS
from reprieve.errors import ReprieveError
from reprieve.files import read_file, read_json, replace_file
from reprieve.heads.binding import digest

SCHEMA = 1
CERTIFICATES = "certificates"  # folder inside a head's folder
_CONFIG, _WEIGHTS, _CARD = "config.json", "model.safetensors", "README.md"


def write_head(
    folder: Path,
    kind: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    others: Mapping[str, str],
) -> None:
    """Write a head's files under temporary names and rename them, the weights first.

    Args:
        others: texts by path inside the folder: model card and certificates.

    Raises:
        ReprieveError: the folder cannot be made, or holds something else.
    """
    folder = Path(folder)
    require_free(folder, kind)
    content = _bytes_of(tensors)
    document = {"schema": SCHEMA, "kind": kind, **config}
    document["sha256"] = signature(document, content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _WEIGHTS, content)
        replace_file(folder / _CONFIG, json.dumps(document, indent=2) + "\n")
        for name, text in others.items():
            replace_file(folder / name, text)
    except OSError as error:
        raise ReprieveError(f"{str(folder)!r} cannot be written: {error.strerror}") from None


def fingerprint_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of weights, so that runs of a retrained head do not mix with those of the old one."""
    return digest(_bytes_of(tensors))


def _bytes_of(tensors: Mapping[str, Tensor]) -> bytes:
    # Copies, because the format refuses tensors that share memory.
    copies = {
        name: torch.clone(tensor.detach().cpu(), memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(copies)


def require_free(folder: Path, kind: str) -> None:
    """Refuse a folder with a `config.json` of another kind.

    Raises:
        ReprieveError: names it.
    """
    config_path = Path(folder) / _CONFIG
    if config_path.exists() and _kind(config_path) != kind:
        raise ReprieveError(f"{str(folder)!r} holds something else than a {kind} head; name another folder")


def claim_head(folder: Path, kind: str | None = None) -> None:
    """Create a folder before a long computation, so that its result can be saved.

    Args:
        kind: of the head to be written; None if decided later.

    Raises:
        ReprieveError: it cannot be created, or holds something else.
    """
    if kind is not None:
        require_free(folder, kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReprieveError(f"{str(folder)!r} cannot be made: {error.strerror}") from None


def read_head(
    source: str | Path, kind: str, keys: frozenset[str], *, optional: frozenset[str] = frozenset(), **download: Any
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """Return configuration, tensors and certificates of a head, from a folder or a hub id.

    Args:
        kind: required kind of head.
        keys: keys of the configuration besides schema, kind and digest; missing or additional ones are an error.
        optional: keys that may be missing.
        download: arguments of `huggingface_hub.snapshot_download`.

    Raises:
        ReprieveError: not found, another kind, unreadable, or weights that do not match the digest.
    """
    folder = find_head(source, **download)
    config = read_json(folder / _CONFIG, f"head {str(source)!r}: the file")
    content = read_file(folder / _WEIGHTS, f"head {str(source)!r}: the file")
    if not isinstance(config, dict):
        raise ReprieveError(f"head {str(source)!r}: {_CONFIG} must be an object, got {type(config).__name__}")
    if config.get("schema") != SCHEMA or config.get("kind") != kind:
        raise ReprieveError(
            f"head {str(source)!r} must be of kind {kind} (schema {SCHEMA}), got {config.get('kind')!r}"
        )
    wanted = config.pop("sha256", None)
    if signature(config, content) != wanted:
        raise ReprieveError(f"head {str(source)!r}: {_CONFIG} or {_WEIGHTS} was changed after they were saved together")
    del config["kind"], config["schema"]
    if not keys - optional <= config.keys() <= keys:
        odd = ", ".join(sorted(config.keys() ^ keys))
        raise ReprieveError(f"head {str(source)!r}: {_CONFIG} must hold {', '.join(sorted(keys))}; check {odd}")
    try:
        return config, load(content), _certificates(folder)
    except (SafetensorError, ValueError) as error:
        raise ReprieveError(f"head {str(source)!r}: {_WEIGHTS} cannot be read: {error}") from None


def find_head(source: str | Path, *, also: tuple[str, ...] = (), **download: Any) -> Path:
    """Return the folder for a name: a bundled head, a folder, or a local copy of a hub repository.

    Args:
        also: patterns of further files to download.
        download: arguments of `huggingface_hub.snapshot_download`.

    Raises:
        ReprieveError: no folder and no hub id, or the download failed.
    """
    if str(source) in BUNDLED_HEADS:
        return BUNDLED_HEADS[str(source)]
    folder = Path(source)
    if folder.is_dir():
        return folder
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise ReprieveError(f"head {str(source)!r} is neither a folder nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        files = [_CONFIG, _WEIGHTS, _CARD, f"{CERTIFICATES}/*.json", "training.json", *also]
        return Path(snapshot_download(str(source), allow_patterns=files, **download))
    except Exception as error:  # the hub raises many types: no network, no repository, no access
        reason = " ".join(str(error).split())
        raise ReprieveError(f"head {str(source)!r} is no folder here, and the hub says: {reason}") from None


def kind_of(source: str | Path) -> str:
    """Return the kind of head in a folder or hub repository.

    Raises:
        ReprieveError: not found, or no kind in its configuration.
    """
    kind = _kind(find_head(source) / _CONFIG)
    if not isinstance(kind, str):
        raise ReprieveError(f"head {str(source)!r} cannot be read: its {_CONFIG} names no kind")
    return kind


def _certificates(folder: Path) -> dict[str, str]:
    """Return the texts of the certificates of a head, by path inside its folder."""
    paths = sorted((folder / CERTIFICATES).glob("*.json"))
    return {f"{CERTIFICATES}/{path.name}": path.read_text(encoding="utf-8") for path in paths}


def _kind(path: Path) -> Any:
    try:
        config = read_json(path, "the file")
    except ReprieveError:
        return None
    # EAGLE-3 heads use the speculators library's format, which names the kind differently.
    return config.get("kind", config.get("speculators_model_type")) if isinstance(config, dict) else None


def signature(config: Mapping[str, Any], content: bytes = b"") -> str:
    """Return a digest over a document and its weights, so that neither can be changed alone."""
    canonical = json.dumps(config, sort_keys=True).encode()
    return hashlib.sha256(canonical + content).hexdigest()
