"""Count the lossless answers that equal the target's own. Without rounding, all would.

    python benchmarks/rounding.py RUN [RUN ...] --out OUT

Each run must have decoded greedily, with the target alone and with at least one lossless arm.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arms import part, run, write_parts
from reprieve.bench.arms import LOSSLESS, rule_of
from reprieve.bench.records import read_answers, read_run
from reprieve.bench.summary import common_rows
from reprieve.engine import TARGET_ONLY
from reprieve.errors import SpecError

HEAD = ["run", "target", "computed in", "engine", "arm", "answers that equal the target's"]


def rounding_rows(name: str, folder: Path) -> list[list[object]]:
    """Return a row of the table for each lossless arm of a run.

    Raises:
        SpecError: a run that sampled, or that lacks the target's own answers or lossless ones.
    """
    config = read_run(folder)
    if temperature := config["sampling"]["temperature"]:
        raise SpecError(f"{str(folder)!r} must have temperature 0, got {temperature}")
    rows = common_rows(config["arms"], read_answers(folder), config["num_trials"])
    lossless = [arm for arm in rows if rule_of(arm) == LOSSLESS]
    if not rows.get(TARGET_ONLY) or not lossless:
        raise SpecError(f"{str(folder)!r} must hold answers of {TARGET_ONLY} and of a lossless arm")
    table: list[list[object]] = []
    for arm in lossless:
        pairs = list(zip(rows[TARGET_ONLY], rows[arm], strict=True))
        equal = sum(own[0].text == answer[0].text for own, answer in pairs)
        cells = [config["target"], config["dtype"], config["engine"], f"`{arm}`"]
        table.append([name, *cells, f"{equal} of {len(pairs)}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    arguments = parser.parse_args()
    rows = [row for folder in arguments.runs for row in rounding_rows(folder.name, folder)]
    write_parts(arguments.out / "rounding.json", {"rounding": part(HEAD, rows)})


if __name__ == "__main__":
    run(main)
