"""Selection of the arbiter with the best held-out result during a training."""

from __future__ import annotations

from pathlib import Path

from reprieve.heads.arbiter import Arbiter


def keep_best(folder: Path, made: Arbiter, *, measure: str, lower: bool = False) -> None:
    """Save an arbiter, unless the saved one did better in the same training.

    Args:
        measure: key of `training["validation"]` to compare; larger is better, or smaller with `lower`.

    Raises:
        ReprieveError: the saved head is no arbiter.
    """
    if made.training["update"] > 0 and (folder / "config.json").exists():
        before = Arbiter.from_pretrained(folder).training
        old, new = (training["validation"][measure] for training in (before, made.training))
        if before["recipe"] == made.training["recipe"] and (old <= new if lower else old >= new):
            return
    made.save_pretrained(folder)
