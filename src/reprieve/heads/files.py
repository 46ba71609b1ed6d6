"""Head folders: where they are, which kind of head they hold, and the digest that binds their files together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.bundles import BUNDLED_HEADS
from reprieve.errors import ReprieveError
from reprieve.files import open_folder, read_json

if TYPE_CHECKING:
    from filelock import FileLock

CERTIFICATES = "certificates"  # folder inside a head's folder
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"

_claimed: dict[Path, FileLock] = {}  # held until the process ends


def require_free(folder: Path, kind: str) -> None:
    """Refuse a folder with a `config.json` of another kind.

    Raises:
        ReprieveError: names it.
    """
    config_path = Path(folder) / CONFIG
    if config_path.exists() and _kind(config_path) != kind:
        raise ReprieveError(f"{str(folder)!r} holds something else than a {kind} head; name another folder")


def claim_head(folder: Path, kind: str | None = None) -> None:
    """Create a folder before a long computation, so that its result can be saved, and lock it for this process.

    Args:
        kind: of the head to be written; None if decided later.

    Raises:
        ReprieveError: it cannot be created, holds something else, or another process writes to it.
    """
    if kind is not None:
        require_free(folder, kind)
    _claimed[folder.absolute()] = open_folder(folder)


def find_head(source: str | Path, **download: Any) -> Path:
    """Return the folder for a name: a bundled head, a folder, or a local copy of a hub repository.

    Args:
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
        files = [CONFIG, WEIGHTS, CARD, f"{CERTIFICATES}/*.json", "training.json"]
        return Path(snapshot_download(str(source), allow_patterns=files, **download))
    except Exception as error:  # the hub raises many types: no network, no repository, no access
        reason = " ".join(str(error).split())
        raise ReprieveError(f"head {str(source)!r} is not a folder here, and the hub says: {reason}") from None


def kind_of(source: str | Path) -> str:
    """Return the kind of head in a folder or hub repository.

    Raises:
        ReprieveError: not found, or no kind in its configuration.
    """
    path = find_head(source) / CONFIG
    if not path.is_file():
        raise ReprieveError(f"head {str(source)!r} cannot be read: it has no {CONFIG}")
    kind = _kind(path)
    if not isinstance(kind, str):
        raise ReprieveError(f"head {str(source)!r} cannot be read: its {CONFIG} names no kind")
    return kind


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
