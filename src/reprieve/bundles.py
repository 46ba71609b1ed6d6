"""The pairs that travel with the package: their names, tasks and heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bundle:
    """One pair.

    Args:
        name: as `--target` says it.
        key: what its heads' names and its folder begin with.
        task: what it was trained for, and what plain questions are wrapped as.
        heads: the folders of its heads.
        menu: rules that `serve` offers for it; the first is what a request gets that asks for none.
        certified: the judge's thresholds that `study` certifies.
    """

    name: str
    key: str
    task: str
    heads: tuple[str, ...] = ()
    menu: tuple[str, ...] = ()
    certified: str = ""

    @property
    def folder(self) -> Path:
        """Where its models and heads lie."""
        return Path(__file__).parent / "bundled" / self.key

    def role_folder(self, role: str) -> Path:
        """Where its `target` or `draft` lies: a plain transformers model folder."""
        return self.folder / role

    def head(self, folder: str) -> str:
        """The name of one of its heads."""
        return f"reprieve/{self.key}-{folder}"

    @property
    def head_names(self) -> dict[str, str]:
        """Names of its heads, by folder."""
        return {folder: self.head(folder) for folder in self.heads}


ARITHMETIC = Bundle(
    "reprieve/arithmetic-pair",
    "arithmetic",
    "arithmetic",
    ("judge", "pivot", "lts", "eagle3", "arbiter", "length-lossless", "length-judge"),
    menu=("judge:threshold=0.04", "pivot", "margin:delta=2", "top_k:k=2", "typical", "fuzzy:threshold=0.1"),
    certified="0.02,0.04",
)
MINIATURE = Bundle(
    "reprieve/miniature",
    "miniature",
    "word_problems",
    ("judge", "pivot", "eagle3", "lts", "arbiter", "state_arbiter"),
    menu=(
        "judge:threshold=0.1",
        "state_arbiter:threshold=0.51",
        "pivot",
        "margin:delta=2",
        "typical",
        "fuzzy:threshold=1,divergence=kl,form=released",
    ),
    certified="0.05,0.1",
)
BUNDLES = {bundle.name: bundle for bundle in (ARITHMETIC, MINIATURE)}
BY_KEY = {bundle.key: bundle for bundle in BUNDLES.values()}
DEFAULT = MINIATURE
BUNDLED_HEADS = {name: bundle.folder / head for bundle in BUNDLES.values() for head, name in bundle.head_names.items()}


def source_of(name: str | Path, role: str) -> str | Path:
    """Where a model is read from: the folder of a bundled one, else what its name says."""
    bundle = BUNDLES.get(str(name))
    return name if bundle is None else bundle.role_folder(role)


def bundle_of(target: str | Path | None) -> Bundle | None:
    """The bundle whose target this is, by its name or as the folder of its weights; None for any other."""
    if target is None:
        return None
    by_folder = (bundle for bundle in BUNDLES.values() if Path(target) == bundle.role_folder("target"))
    return BUNDLES.get(str(target)) or next(by_folder, None)
