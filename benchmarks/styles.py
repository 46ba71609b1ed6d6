"""Count answers that contain a text, and the problems solved where lossless decoding's answer does and does not.

    python benchmarks/styles.py RUN=TEXT [RUN=TEXT ...] --out OUT

Rules carry the draft's style into the target's answers. If a text marks a style, such as a code block, this splits a
rule's effect on accuracy into that of the style and that of other errors. `^TEXT` counts answers that begin with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arms import paired_rows, part, run, write_parts
from reprieve.bench.arms import LOSSLESS, RERUN
from reprieve.bench.records import ProblemRecord
from reprieve.engine import TARGET_ONLY
from reprieve.errors import SpecError

HEAD = [
    "run",
    "text",
    "arm",
    "answers with the text",
    "solved, lossless answer has it",
    "solved, lossless answer has not",
]


def rows_of(folder: Path, text: str) -> list[list[object]]:
    """Return a row for each arm of a run.

    Raises:
        SpecError: a run without lossless decoding, or with several answers to a problem.
    """
    config, rows = paired_rows(folder)
    if config.get("num_trials", 1) != 1:
        raise SpecError(f"{str(folder)!r} must have 1 answer per problem, got num_trials {config['num_trials']}")
    has_text = [_has(record, text) for (record,) in rows[LOSSLESS]]
    name = folder.name if folder.parent.name == "journals" else f"{folder.parent.name}/{folder.name}"
    table: list[list[object]] = []
    for arm, problems in rows.items():
        if arm in (TARGET_ONLY, RERUN):
            continue
        records = [record for (record,) in problems]
        cells = [_solved(records, has_text, wanted) for wanted in (True, False)]
        table.append([name, f"`{text}`", f"`{arm}`", sum(_has(record, text) for record in records), *cells])
    return table


def _has(record: ProblemRecord, text: str) -> bool:
    return record.text.startswith(text[1:]) if text.startswith("^") else text in record.text


def _solved(records: list[ProblemRecord], has_text: list[bool], wanted: bool) -> str:
    correct = [record.correct for record, has in zip(records, has_text, strict=True) if has == wanted]
    return f"{sum(correct)} of {len(correct)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN=TEXT", help="folder of a run, and the text to look for")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    arguments = parser.parse_args()
    rows = []
    for pair in arguments.runs:
        folder, equals, text = pair.partition("=")
        if not equals or not text:
            parser.error(f"each argument must be RUN=TEXT, got {pair!r}")
        rows += rows_of(Path(folder), text)
    write_parts(arguments.out / "styles.json", {"styles": part(HEAD, rows)})


if __name__ == "__main__":
    run(main)
