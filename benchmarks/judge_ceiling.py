"""Gain of a judge that knows the labels: `python benchmarks/judge_ceiling.py --labels LABELS --run RUN --out OUT`.

AutoJudge's search ends in a response that keeps every drafted token it found unimportant and still has the target's
answer. A rule with the labels' own knowledge rejects only the important mismatches and writes this response. The table
sets its tokens per round beside those of a `bench` run on the same problems, at the run's K, with paired ratios over
lossless decoding. It slightly understates the gain: where the response has an unimportant drafted token right after a
block that was accepted whole, the engine would commit the target's token there, and the count ends the round before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arms import over, part, run, write_parts
from reprieve.bench.arms import LOSSLESS
from reprieve.bench.records import ProblemRecord, read_answers, read_run
from reprieve.bench.summary import common_rows
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.errors import SpecError
from reprieve.mining.store import MINED, LabelStore, ProblemLabels
from reprieve.stats import bootstrap_interval, share_interval

CEILING = "the labels themselves"
SEARCH = "autojudge-search"  # the miner whose final response keeps unimportant drafted tokens


def num_rounds(labels: ProblemLabels, num_draft_tokens: int) -> int:
    """Return the rounds in which a rule that rejects only the important mismatches writes the final response.

    A round ends at the first important mismatch of its block, with the target's token. A block without one is followed
    by the target's own next token; where the response has the draft's token instead, the round ends before it.
    """
    important = {mismatch.position for mismatch in labels.mismatches if mismatch.important is not False}
    unimportant = {mismatch.position for mismatch in labels.mismatches} - important
    position, rounds = 0, 0
    while position < len(labels.response_ids):
        end = position + num_draft_tokens
        rejected = [place for place in important if position <= place < end]
        position = min(rejected) + 1 if rejected else end + (end not in unimportant)
        rounds += 1
    return rounds


def ratio(totals: np.ndarray, index: np.ndarray) -> float:
    """Return tokens per round over tokens per round of lossless; totals [n, 4] hold both pairs of counts."""
    tokens, rounds, lossless_tokens, lossless_rounds = totals[index].sum(0)
    return float(tokens / rounds / (lossless_tokens / lossless_rounds))


def row(name: str, correct: Sequence[bool], counts: np.ndarray, lossless: np.ndarray) -> list[object]:
    """Return the row of an arm, given tokens and rounds of each problem, [n, 2], its own and those of lossless."""
    totals = np.concatenate([counts, lossless], 1)
    interval = bootstrap_interval(lambda index: ratio(totals, index), len(totals))
    solved = np.array(correct, float)[:, None]
    tokens, rounds = counts.sum(0)
    return [
        name,
        over([float(solved.mean()), *share_interval(solved)], 1, 100),
        f"{tokens / rounds:.2f}",
        over([ratio(totals, np.arange(len(totals))), *interval], 2),
    ]


def one_k(config: dict[str, Any], folder: Path) -> int:
    """Return the K of a greedy run with one trial.

    Raises:
        SpecError: several values of K, or none that is a number; sampling; several trials.
    """
    ks = config["num_draft_tokens"]
    if len(ks) != 1 or not isinstance(ks[0], int):
        raise SpecError(f"{str(folder)!r} must be a run at one K, a number, got {ks}")
    if config["sampling"]["temperature"] or config["num_trials"] != 1:
        raise SpecError(f"{str(folder)!r} must be a greedy run with one trial")
    return int(ks[0])


def counts_of(records: Sequence[ProblemRecord]) -> np.ndarray:
    """Return tokens and rounds of each answer, [n, 2]."""
    return np.array([[record.num_tokens, record.num_rounds] for record in records], float)


def ceiling(labels_folder: Path, run_folder: Path) -> dict[str, Any]:
    """Return the table.

    Raises:
        SpecError: a run that is sampled, has several trials or several K, or labels of another pair or other problems.
    """
    config = read_run(run_folder)
    k = one_k(config, run_folder)
    rows = common_rows(config["arms"], read_answers(run_folder))
    store = LabelStore(labels_folder)
    for name in ("target", "draft", "task", "split"):
        if (found := store.manifest.get(name)) != config[name]:
            raise SpecError(f"labels must have the run's {name}, {config[name]!r}, got {found!r}")
    labels = {one.problem_id: one for one in store.problems() if one.status == MINED and one.source == SEARCH}
    kept = [i for i, (record,) in enumerate(rows[LOSSLESS]) if record.problem_id in labels]
    if not kept:
        raise SpecError(f"{str(labels_folder)!r} holds no labels by AutoJudge's search of the problems of the run")
    records = {arm: [trials[0] for trials in (answers[i] for i in kept)] for arm, answers in rows.items()}
    lossless = counts_of(records[LOSSLESS])
    table = [
        row(f"`{arm}`", [record.correct for record in answers], counts_of(answers), lossless)
        for arm, answers in records.items()
        if arm not in (TARGET_ONLY, DRAFT_ONLY)
    ]
    perfect = [labels[record.problem_id] for record in records[LOSSLESS]]
    counts = np.array([[len(one.response_ids), num_rounds(one, k)] for one in perfect], float)
    table.append(row(CEILING, [record.correct for record in records[TARGET_ONLY]], counts, lossless))
    note = f"n = {len(kept)} {config['split']} problems, greedy, K = {k}; brackets are 95% intervals."
    return part(["decided by", "solved, %", "tokens per round", "tokens per round, over lossless"], table, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True, help="label store of the run's problems, by the search")
    parser.add_argument("--run", type=Path, required=True, help="folder of a greedy bench run at one K")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_parts(options.out / "ceiling.json", {"ceiling": ceiling(options.labels, options.run)})


if __name__ == "__main__":
    run(main)
