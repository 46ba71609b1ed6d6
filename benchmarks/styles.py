"""Split a rule's effect on accuracy by the style of answers, and by their first token.

    python benchmarks/styles.py RUN=TEXT [RUN=TEXT ...] [--shared] --out OUT

Rules carry the draft's style into the target's answers. The first table counts answers that contain a text, such as a
code block, and the problems solved where lossless decoding's answer does and does not. `^TEXT` counts answers that
begin with it. The second table splits the problems by whether the rule rescued the answer's first token, in runs that
record where each token comes from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arms import paired_rows, part, run, write_parts
from reprieve.bench.arms import LOSSLESS, RERUN
from reprieve.bench.records import ProblemRecord
from reprieve.engine import TARGET_ONLY
from reprieve.errors import SpecError

STYLE_HEAD = [
    "run",
    "text",
    "arm",
    "answers with the text",
    "solved, lossless answer has it",
    "solved, lossless answer has not",
]


FIRST_HEAD = [
    "run",
    "arm",
    "solved, first token rescued",
    "the same problems, lossless",
    "solved, others",
    "the same problems, lossless",
]


def arms_of(folder: Path) -> dict[str, list[ProblemRecord]]:
    """Return each arm's answers, in the same order of problems.

    Raises:
        SpecError: a run without lossless decoding, or with several answers to a problem.
    """
    config, rows = paired_rows(folder)
    if config.get("num_trials", 1) != 1:
        raise SpecError(f"{str(folder)!r} must have 1 answer per problem, got num_trials {config['num_trials']}")
    skipped = (TARGET_ONLY, RERUN)
    return {arm: [record for (record,) in problems] for arm, problems in rows.items() if arm not in skipped}


def shared(runs: dict[str, dict[str, list[ProblemRecord]]]) -> dict[str, dict[str, list[ProblemRecord]]]:
    """Return the answers of every run to the problems that all of them have."""
    ids = set.intersection(*({record.problem_id for record in arms[LOSSLESS]} for arms in runs.values()))
    return {
        name: {arm: [record for record in records if record.problem_id in ids] for arm, records in arms.items()}
        for name, arms in runs.items()
    }


def style_rows(name: str, arms: dict[str, list[ProblemRecord]], text: str) -> list[list[object]]:
    """Return a row of the first table for each arm of a run."""
    has_text = [_has(record, text) for record in arms[LOSSLESS]]
    table: list[list[object]] = []
    for arm, records in arms.items():
        cells = [_solved(records, has_text, wanted) for wanted in (True, False)]
        table.append([name, f"`{text}`", f"`{arm}`", sum(_has(record, text) for record in records), *cells])
    return table


def first_token_rows(name: str, arms: dict[str, list[ProblemRecord]]) -> list[list[object]]:
    """Return a row of the second table for each arm that rescued first tokens."""
    table: list[list[object]] = []
    for arm, records in arms.items():
        rescued = [bool(record.spans) and record.spans[0][1] == "r" for record in records]
        if any(rescued):
            solved = [
                _solved(those, rescued, wanted) for wanted in (True, False) for those in (records, arms[LOSSLESS])
            ]
            table.append([name, f"`{arm}`", *solved])
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
    parser.add_argument("--shared", action="store_true", help="only the problems that all runs have")
    arguments = parser.parse_args()
    runs, texts = {}, []
    for pair in arguments.runs:
        folder, equals, text = pair.partition("=")
        if not equals or not text:
            parser.error(f"each argument must be RUN=TEXT, got {pair!r}")
        name = folder.rstrip("/").rpartition("journals/")[2]
        runs[name] = arms_of(Path(folder))
        texts.append((name, text))
    if arguments.shared:
        runs = shared(runs)
    styles = [row for name, text in texts for row in style_rows(name, runs[name], text)]
    first = [row for name, arms in runs.items() for row in first_token_rows(name, arms)]
    write_parts(arguments.out / "styles.json", {"styles": part(STYLE_HEAD, styles), "first": part(FIRST_HEAD, first)})


if __name__ == "__main__":
    run(main)
