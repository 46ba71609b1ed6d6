"""Of the arbiters that a training goes through, the one that did best on problems it was not trained on."""

from __future__ import annotations

from pathlib import Path

from reprieve.heads.arbiter import Arbiter


def keep_best(folder: Path, made: Arbiter, *, measure: str, lower: bool = False) -> None:
    """Save an arbiter, unless the one that is there did better in the same training.

    Args:
        measure: which of `training["validation"]` compares them; the larger is better, or the `lower`.

    Raises:
        ReprieveError: what is there is no arbiter.
    """
    if made.training["update"] > 0 and (folder / "config.json").exists():
        before = Arbiter.from_pretrained(folder).training
        old, new = (training["validation"][measure] for training in (before, made.training))
        if before["recipe"] == made.training["recipe"] and (old <= new if lower else old >= new):
            return
    made.save_pretrained(folder)
