"""Bundled pairs: their names, tasks and heads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reprieve.errors import SpecError

_OURS = "reprieve/"  # names with this prefix are not looked up on the hub
_OTHERS = "REPRIEVE_BUNDLES"  # folders with further bundles


@dataclass(frozen=True)
class Bundle:
    """One pair.

    Args:
        name: name to pass to `--target`.
        key: name of its folder, and prefix of its heads' names.
        task: task it was trained for; plain questions are wrapped in its format.
        folder: folder with its models, heads and `bundle.json`.
        heads: names of its heads, by folder.
        menu: rules that `serve` offers for it; the first is the default for requests that choose none.
    """

    name: str
    key: str
    task: str
    folder: Path
    heads: Mapping[str, str] = field(default_factory=dict)
    menu: tuple[str, ...] = ()

    def role_folder(self, role: str) -> Path:
        """Return the folder of its `target` or `draft`, in transformers' format."""
        return self.folder / role


def _bundles() -> dict[str, Bundle]:
    """Return the package's bundles and those under the folders that REPRIEVE_BUNDLES names, by name."""
    roots = [Path(__file__).parent / "bundled", *map(Path, filter(None, os.environ.get(_OTHERS, "").split(os.pathsep)))]
    bundles = {}
    for path in (path for root in roots for path in sorted(root.glob("*/bundle.json"))):
        found = json.loads(path.read_text(encoding="utf-8"))
        name, folder = found["name"], path.parent
        heads = {head: f"reprieve/{folder.name}-{head}" for head in found["heads"]}
        bundles[name] = Bundle(name, folder.name, found["task"], folder, heads, tuple(found["menu"]))
    return bundles


BUNDLES = _bundles()
BY_KEY = {bundle.key: bundle for bundle in BUNDLES.values()}
DEFAULT = BUNDLES["reprieve/miniature"]
BUNDLED_HEADS = {name: bundle.folder / head for bundle in BUNDLES.values() for head, name in bundle.heads.items()}


def source_of(name: str | Path, role: str) -> str | Path:
    """Return the source of a model: the folder of a bundled one, else the given name.

    Raises:
        SpecError: a name that begins with `reprieve/` and is neither a bundled pair nor an existing path.
    """
    bundle = BUNDLES.get(str(name))
    if bundle is None and str(name).startswith(_OURS) and not Path(name).exists():
        raise SpecError(f"{role} must be one of {', '.join(BUNDLES)} or another model, got {str(name)!r}")
    return name if bundle is None else bundle.role_folder(role)


def bundle_of(target: str | Path | None) -> Bundle | None:
    """Return the bundle whose target this is, given by name or by the folder of its weights; None for others."""
    if target is None:
        return None
    by_folder = (bundle for bundle in BUNDLES.values() if Path(target) == bundle.role_folder("target"))
    return BUNDLES.get(str(target)) or next(by_folder, None)
