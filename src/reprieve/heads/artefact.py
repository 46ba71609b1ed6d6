"""Saving and loading heads: a folder of `config.json` and `model.safetensors`, checked against each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from reprieve.errors import ReprieveError
from reprieve.files import replace_file
from reprieve.heads.binding import digest

SCHEMA = 1
BUNDLED = {
    f"reprieve/arithmetic-{kind}": kind for kind in ("judge", "pivot", "lts", "eagle3", "arbiter")
}  # heads of the bundled pair
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def save_artefact(folder: Path, kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files under temporary names and rename them, the weights first.

    Raises:
        ReprieveError: the folder cannot be made, or holds something else.
    """
    folder = Path(folder)
    require_free(folder, kind)
    config_path = folder / _CONFIG
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    document = {"schema": SCHEMA, "kind": kind, **config}
    document["sha256"] = _digest(document, content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in (
            (folder / _WEIGHTS, content),
            (config_path, (json.dumps(document, indent=2) + "\n").encode()),
        ):
            replace_file(path, data)
    except OSError as error:
        raise ReprieveError(f"{str(folder)!r} cannot be written: {error.strerror}") from None


def fingerprint_of(tensors: Mapping[str, Tensor]) -> str:
    """Identifies weights: runs of a head trained anew are not mixed with those of the old one."""
    return digest(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def require_free(folder: Path, kind: str) -> None:
    """Refuse a folder that holds something else than what is to be written there.

    Raises:
        ReprieveError: names it.
    """
    config_path = Path(folder) / _CONFIG
    if config_path.exists() and _kind(config_path) != kind:
        raise ReprieveError(f"{str(folder)!r} holds something else than a {kind} head; name another folder")


def claim_folder(folder: Path, kind: str | None = None) -> None:
    """Make a folder, so that what took long to make has a place to go.

    Args:
        kind: of the head that is to be written into it; None where that is said later.

    Raises:
        ReprieveError: it cannot be made, or holds something else.
    """
    if kind is not None:
        require_free(folder, kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReprieveError(f"{str(folder)!r} cannot be made: {error.strerror}") from None


def load_artefact(
    source: str | Path, kinds: tuple[str, ...], keys: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a head, from a folder or a hub id.

    Args:
        kinds: which kinds of head are wanted.
        keys: what the configuration holds beside schema, kind and digest; more or less is an error.

    Raises:
        ReprieveError: not found, another kind, unreadable, or weights that are not those it was saved with.
    """
    folder = find_artefact(source)
    try:
        config = json.loads((folder / _CONFIG).read_text())
        content = (folder / _WEIGHTS).read_bytes()
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ReprieveError(f"head {str(source)!r} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ReprieveError(f"head {str(source)!r}: {_CONFIG} must be an object, got {type(config).__name__}")
    if config.get("schema") != SCHEMA or config.get("kind") not in kinds:
        raise ReprieveError(
            f"head {str(source)!r} must be of kind {' or '.join(kinds)} (schema {SCHEMA}), got {config.get('kind')!r}"
        )
    wanted = config.pop("sha256", None)
    if _digest(config, content) != wanted:
        raise ReprieveError(f"head {str(source)!r}: {_CONFIG} and {_WEIGHTS} are not as they were saved together")
    kind = config.pop("kind")
    del config["schema"]
    if config.keys() != keys:
        odd = ", ".join(sorted(config.keys() ^ keys))
        raise ReprieveError(f"head {str(source)!r}: {_CONFIG} must hold {', '.join(sorted(keys))}; check {odd}")
    try:
        return {"kind": kind, **config}, load(content)
    except (SafetensorError, ValueError) as error:
        raise ReprieveError(f"head {str(source)!r}: {_WEIGHTS} cannot be read: {error}") from None


def find_artefact(source: str | Path) -> Path:
    """The folder a name means: a bundled head's, itself, or a copy of a hub repository."""
    if str(source) in BUNDLED:
        return Path(str(resources.files("reprieve.pair"))) / "heads" / BUNDLED[str(source)]
    folder = Path(source)
    if folder.is_dir():
        return folder
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise ReprieveError(f"head {str(source)!r} is neither a folder nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=[_CONFIG, _WEIGHTS]))
    except Exception as error:  # no network, no such repository, no access: the hub has many ways to say it
        told = " ".join(str(error).split())
        raise ReprieveError(f"head {str(source)!r} is no folder here, and the hub says: {told}") from None


def _kind(path: Path) -> Any:
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    # EAGLE-3 heads are in the speculators library's format, which has a name of its own for this.
    return found.get("kind", found.get("speculators_model_type")) if isinstance(found, dict) else None


def _digest(config: Mapping[str, Any], content: bytes) -> str:
    """Over configuration and weights together: neither can be changed without the other knowing."""
    canonical = json.dumps(config, sort_keys=True).encode()
    return hashlib.sha256(canonical + content).hexdigest()
