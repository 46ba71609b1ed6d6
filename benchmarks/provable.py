"""Limits that a run proves for its rules, as in `certify`: `python benchmarks/provable.py RUN [RUN ...] --out OUT`.

Each rule is compared with lossless decoding on the run's problems: its loss, the growth of its answers and the share of
them left unfinished, each with the upper limit at 95% confidence for that arm alone. The last column is the number of
problems that would prove a loss below `--max-drop` if all problems were like the run's. This is not a certificate:
nothing is confirmed on held-out problems.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from arms import paired_rows, part, run, write_parts
from reprieve.bench.arms import LOSSLESS
from reprieve.bench.records import ProblemRecord
from reprieve.bench.settings import Promise
from reprieve.bench.summary import column
from reprieve.certify.bounds import betting_pvalue
from reprieve.certify.fixed_sequence import Lengths, paired_test
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.errors import SpecError

Trials = list[list[ProblemRecord]]  # of each problem
MAX_REPEATS = 512  # of a run's problems; a rule that needs more loses nearly as much as is allowed


def rows_of(folder: Path, promise: Promise) -> list[list[object]]:
    """Return a row for each rule of a run.

    Raises:
        SpecError: a run without lossless decoding, or without a limit on answers.
    """
    config, rows = paired_rows(folder)
    if (budget := config["prompt"]["max_new_tokens"]) is None:
        raise SpecError(
            f"{str(folder)!r} must be a run with --max-new-tokens, which bounds how much an answer can grow"
        )
    strict = rows[LOSSLESS]
    solved = column(strict, lambda record: record.correct)
    table: list[list[object]] = []
    for label in config["arms"]:
        if label in (TARGET_ONLY, DRAFT_ONLY, LOSSLESS):
            continue
        lengths = lengths_of(strict, rows[label], budget)
        relaxed = column(rows[label], lambda record: record.correct)
        test = paired_test(promise, solved, relaxed, lengths)
        growth, unfinished = test.risks
        needed = num_needed(promise, (solved - relaxed).mean(1))
        table.append(
            [
                folder.name,
                f"`{label}`",
                len(strict),
                f"{100 * test.observed:+.1f}, at most {100 * test.upper_bound:.1f}",
                f"{100 * growth.observed:+.0f}, at most {100 * growth.upper_bound:.0f}",
                f"{100 * unfinished.observed:+.1f}, at most {100 * unfinished.upper_bound:.1f}",
                "-" if needed is None else needed,
            ]
        )
    return table


def lengths_of(strict: Trials, relaxed: Trials, budget: int) -> Lengths:
    """Return the lengths of paired answers, and whether each was cut off."""

    def tokens(record: ProblemRecord) -> int:
        return record.num_tokens

    def cut(record: ProblemRecord) -> bool:
        return record.finish_reason == "length"

    return Lengths(column(strict, tokens), column(relaxed, tokens), column(strict, cut), column(relaxed, cut), budget)


def num_needed(promise: Promise, losses: np.ndarray) -> int | None:
    """Return the number of such problems that prove the promised loss; None if MAX_REPEATS times as many do not."""
    repeats = 1
    while repeats <= MAX_REPEATS and losses.mean() < promise.max_drop:
        repeated = np.tile(losses, repeats)
        if betting_pvalue(repeated, promise.max_drop, confidence=promise.confidence) <= 1 - promise.confidence:
            return repeats * len(losses)
        repeats += 1
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of `reprieve bench`")
    parser.add_argument("--max-drop", type=float, default=0.03, help="loss to prove, as a share")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    promise = Promise(options.max_drop, max_growth=0.1, max_unfinished=0.01)
    rows = [row for folder in options.runs for row in rows_of(folder, promise)]
    points = 100 * options.max_drop
    head = ["run", "arm", "n", "lost, points", "longer, %", "more unfinished, points", f"n for {points:g} points"]
    note = "Against lossless decoding; limits at 95% confidence for one arm alone."
    write_parts(options.out / "provable.json", {"provable": part(head, rows, note)})


if __name__ == "__main__":
    run(main)
