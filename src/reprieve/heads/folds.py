"""Out-of-fold heads, for tasks without a training split: each problem uses a head that was not trained on it.

AutoJudge evaluates LiveCodeBench this way (section 4.2). A folder holds `fold-0`, `fold-1`, ... and `folds.json`; a
problem's id determines its fold.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from reprieve.errors import ReprieveError, SpecError, require_whole
from reprieve.files import read_json, replace_file
from reprieve.heads.classifiers import Head
from reprieve.heads.settings import FeatureRecipe
from reprieve.identity import PairIdentity, digest
from reprieve.types import Evidence

MIN_FOLDS, MAX_FOLDS = 2, 64
_FILE = "folds.json"


def fold_of(problem_id: str, num_folds: int) -> int:
    """Return the fold of a problem, independent of the rest of the data set."""
    return int(digest(problem_id.encode()), 16) % num_folds


def fold_folder(folder: str | Path, fold: int) -> Path:
    """Return the folder of a fold's head."""
    return Path(folder) / f"fold-{fold}"


def write_folds(folder: Path, num_folds: int) -> None:
    """Declare a folder of heads to be folds; call it last."""
    replace_file(folder / _FILE, json.dumps({"schema": 1, "num_folds": num_folds}) + "\n")


def read_folds(folder: str | Path) -> int | None:
    """Return the number of folds in a folder; None if it holds no folds.

    Raises:
        ReprieveError: `folds.json` cannot be read.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        return None
    try:
        num_folds = int(read_json(path, "the folds")["num_folds"])
        require_whole("folds", num_folds, MIN_FOLDS, MAX_FOLDS)
    except (ValueError, KeyError, TypeError) as error:
        raise ReprieveError(f"{str(path)!r} cannot be read: {error}") from None
    return num_folds


@dataclass(frozen=True)
class FoldedHead:
    """Heads of all folds as one object: one name in results, but a separate head for each fold of problems."""

    heads: Sequence[Head]

    @classmethod
    def load(cls, folder: str | Path, load: Callable[[str], Head]) -> FoldedHead:
        """Load all folds of a folder.

        Raises:
            ReprieveError: a fold cannot be loaded.
        """
        return cls([load(str(fold_folder(folder, fold))) for fold in range(read_folds(folder) or 0)])

    def of(self, problem_id: str) -> Head:
        """Return the head that was not trained on a problem."""
        return self.heads[fold_of(problem_id, len(self.heads))]

    @property
    def threshold(self) -> float:
        """Common threshold of all folds: the median of their recommendations."""
        return statistics.median(head.threshold for head in self.heads)

    @property
    def recipe(self) -> FeatureRecipe:
        return self.heads[0].recipe

    @property
    def task(self) -> str:
        return self.heads[0].task

    @property
    def fingerprint(self) -> str:
        return digest("".join(head.fingerprint for head in self.heads).encode())

    def to(self, device: Any) -> FoldedHead:
        return FoldedHead([head.to(device) for head in self.heads])

    def require_pair(self, pair: PairIdentity, name: str) -> None:
        """Refuse a pair other than the folds' own."""
        for head in self.heads:
            head.require_pair(pair, name)

    def risk(self, evidence: Evidence) -> Tensor:
        """Refuse, because the head depends on the problem, which a round does not know.

        Raises:
            SpecError: always.
        """
        raise SpecError("out-of-fold heads need to know the problem: use them in bench or certify")
