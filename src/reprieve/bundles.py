"""The pairs that travel with the package: their names, tasks and heads."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from reprieve.errors import SpecError

_FILE = "bundle.json"
_OURS = "reprieve/"  # names beginning so are not asked of the hub
_OTHERS = "REPRIEVE_BUNDLES"  # folders with further bundles


@dataclass(frozen=True)
class Bundle:
    """One pair.

    Args:
        name: as `--target` says it.
        key: what its heads' names and its folder begin with.
        task: what it was trained for, and what plain questions are wrapped as.
        folder: its models, heads and `bundle.json`.
        heads: the folders of its heads.
        menu: rules that `serve` offers for it; the first is what a request gets that asks for none.
        certified: the judge's thresholds that `benchmarks/study.py` certifies.
    """

    name: str
    key: str
    task: str
    folder: Path
    heads: tuple[str, ...] = ()
    menu: tuple[str, ...] = ()
    certified: str = ""

    def role_folder(self, role: str) -> Path:
        """Return the folder of its `target` or `draft`, in transformers' format."""
        return self.folder / role

    def head(self, folder: str) -> str:
        """The name of one of its heads."""
        return f"reprieve/{self.key}-{folder}"

    @property
    def head_names(self) -> dict[str, str]:
        """Names of its heads, by folder."""
        return {folder: self.head(folder) for folder in self.heads}


def _read(folder: Path) -> Bundle:
    """Return the bundle that a folder's `bundle.json` describes."""
    found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    heads, menu = tuple(found["heads"]), tuple(found["menu"])
    return Bundle(found["name"], folder.name, found["task"], folder, heads, menu, found["certified"])


def _bundles() -> dict[str, Bundle]:
    """Return the package's bundles and those under the folders that REPRIEVE_BUNDLES names, by name."""
    roots = [Path(__file__).parent / "bundled", *map(Path, filter(None, os.environ.get(_OTHERS, "").split(os.pathsep)))]
    read = [_read(path.parent) for root in roots for path in sorted(root.glob(f"*/{_FILE}"))]
    return {bundle.name: bundle for bundle in read}


BUNDLES = _bundles()
BY_KEY = {bundle.key: bundle for bundle in BUNDLES.values()}
DEFAULT = BUNDLES["reprieve/miniature"]
BUNDLED_HEADS = {name: bundle.folder / head for bundle in BUNDLES.values() for head, name in bundle.head_names.items()}


def source_of(name: str | Path, role: str) -> str | Path:
    """Return where a model is read from: the folder of a bundled one, else what its name says.

    Raises:
        SpecError: a name of a bundled pair that there is not.
    """
    bundle = BUNDLES.get(str(name))
    if bundle is None and str(name).startswith(_OURS) and not Path(name).exists():
        raise SpecError(f"{role} must be one of {', '.join(BUNDLES)} or another model, got {str(name)!r}")
    return name if bundle is None else bundle.role_folder(role)


def bundle_of(target: str | Path | None) -> Bundle | None:
    """The bundle whose target this is, by its name or as the folder of its weights; None for any other."""
    if target is None:
        return None
    by_folder = (bundle for bundle in BUNDLES.values() if Path(target) == bundle.role_folder("target"))
    return BUNDLES.get(str(target)) or next(by_folder, None)
