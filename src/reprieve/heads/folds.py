"""Out-of-fold heads, for tasks without a training split: no problem meets a head that was trained on it.

AutoJudge evaluates LiveCodeBench so (section 4.2). A folder of `fold-0`, `fold-1`, ... with a `folds.json` beside them;
a problem belongs to the fold its id falls into.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from reprieve.errors import ReprieveError, SpecError
from reprieve.files import read_json, replace_file
from reprieve.heads.base import Head
from reprieve.heads.binding import PairIdentity, digest
from reprieve.heads.settings import FeatureRecipe
from reprieve.types import Evidence

MAX_FOLDS = 64
_FILE = "folds.json"


def fold_of(problem_id: str, num_folds: int) -> int:
    """The fold a problem belongs to, whatever else is in the data set."""
    return int(digest(problem_id.encode()), 16) % num_folds


def require_folds(num_folds: int) -> None:
    """Refuse a number of folds outside [2, 64].

    Raises:
        SpecError: names the number.
    """
    if not 2 <= num_folds <= MAX_FOLDS:
        raise SpecError(f"folds must be in [2, {MAX_FOLDS}], got {num_folds}")


def fold_folder(folder: str | Path, fold: int) -> Path:
    """Where a fold's head is."""
    return Path(folder) / f"fold-{fold}"


def write_folds(folder: Path, num_folds: int) -> None:
    """Declare a folder of heads to be folds; the last thing to write."""
    replace_file(folder / _FILE, json.dumps({"schema": 1, "num_folds": num_folds}) + "\n")


def read_folds(folder: str | Path) -> int | None:
    """How many folds a folder holds; None where it is no folder of folds.

    Raises:
        ReprieveError: `folds.json` cannot be read.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        return None
    try:
        num_folds = int(read_json(path, "the folds")["num_folds"])
        require_folds(num_folds)
    except (ValueError, KeyError, TypeError) as error:
        raise ReprieveError(f"{str(path)!r} cannot be read: {error}") from None
    return num_folds


@dataclass(frozen=True)
class FoldedHead:
    """The heads of all folds, as one: it names them in results, and lends each problem the one not trained on it."""

    heads: Sequence[Head]

    @classmethod
    def load(cls, folder: str | Path, load: Callable[[str], Head]) -> FoldedHead:
        """All folds of a folder that has them.

        Raises:
            ReprieveError: a fold cannot be loaded.
        """
        return cls([load(str(fold_folder(folder, fold))) for fold in range(read_folds(folder) or 0)])

    @property
    def threshold(self) -> float:
        """One for all folds, so that arms have one threshold: the median of what each recommends."""
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
        """See `Head`."""
        for head in self.heads:
            head.require_pair(pair, name)

    def risk(self, evidence: Evidence) -> Tensor:
        """Refused: which head answers depends on the problem, and a round does not know it.

        Raises:
            SpecError: always.
        """
        raise SpecError("out-of-fold heads need to know the problem: use them in bench or certify")
