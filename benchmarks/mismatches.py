"""How a mismatch ends, by its position in the answer: `python benchmarks/mismatches.py LABELS --out OUT`.

Reads labels of `reprieve mine arbitration`: at each labelled mismatch, the answer was continued with the target's token
and with the draft's, and both ends were graded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arms import over, part, run, write_parts
from reprieve.mining.store import LabelStore, ProblemLabels
from reprieve.stats import grouped_interval

EDGES = (0, 1, 16)  # first positions of the rows
NAMES = ("first token", "tokens 2 to 16", "later tokens", "all")


class Ending(NamedTuple):
    """A labelled mismatch: its position in the answer, and by how much the draft's side ended better."""

    problem_id: str
    position: int
    gain: float


def endings(problems: Sequence[ProblemLabels]) -> Iterator[Ending]:
    """Yield the mismatches of which both sides were graded."""
    for problem in problems:
        for traced in problem.rounds:
            for node in traced.mismatched_nodes:
                if traced.labels[node] is None:
                    continue
                draft, target = traced.draft_utilities[node], traced.target_utilities[node]
                if draft is not None and target is not None:
                    yield Ending(problem.problem_id, traced.start + node, draft - target)


def row(name: str, chosen: Sequence[Ending]) -> list[str]:
    """Return a row of the table; intervals are over problems."""
    gains, ids = np.array([one.gain for one in chosen]), [one.problem_id for one in chosen]
    shares = []
    for side in (gains == 0, gains < 0, gains > 0):
        shares.append(over([float(side.mean()), *grouped_interval(side, ids)], 1, 100))
    return [name, str(len(chosen)), *shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, help="label store of `reprieve mine arbitration`")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    problems = LabelStore(options.labels).problems()
    found = list(endings(problems))
    groups = np.searchsorted(EDGES, [one.position for one in found], side="right") - 1
    rows = [row(name, [one for one, of in zip(found, groups, strict=True) if of == index])
            for index, name in enumerate(NAMES[:-1])]  # fmt: skip
    rows.append(row(NAMES[-1], found))
    head = ["position", "mismatches", "both sides end equally, %", "the target's ends better, %", "the draft's, %"]
    note = f"{len(problems)} problems; brackets are 95% intervals over problems."
    write_parts(options.out / "mismatches.json", {"mismatches": part(head, rows, note)})


if __name__ == "__main__":
    run(main)
