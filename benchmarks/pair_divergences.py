"""Divergence of a bundled pair's models by problem family: `python benchmarks/pair_divergences.py --num 40`.

FSD's Figure 3: Jensen-Shannon divergences (base 2, 0 to 1) between both models at every token of the target's own
greedy answers to test problems, as a histogram, and the share of tokens on which both agree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import reprieve
from arms import run, whole
from pair_families import of_each_family, worded
from pair_report import Writer
from reprieve.bench.results import Environment
from reprieve.engine import Pair
from reprieve.files import replace_file
from reprieve.rules.fuzzy import fuzzy_divergence
from reprieve.tasks import TaskProblem

EDGES = (0.0, 0.01, 0.1, 0.3, 0.6, 1.0)


@torch.inference_mode()
def divergences(pair: Pair, problem: TaskProblem, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each token of a text, the divergence and whether both models' most likely tokens agree; [n] each."""
    assert pair.draft is not None
    ids = pair.tokenizer(problem.prompt + text, return_tensors="pt").input_ids
    rows = slice(len(pair.tokenizer(problem.prompt).input_ids) - 1, -1)
    target_logits, draft_logits = (model(ids).logits[0, rows].float() for model in (pair.target, pair.draft))
    apart = fuzzy_divergence(target_logits.softmax(-1), draft_logits.softmax(-1), divergence="js")
    return apart.clamp(0.0, 1.0).numpy(), (target_logits.argmax(-1) == draft_logits.argmax(-1)).numpy()


def histogram(values: np.ndarray) -> list[float]:
    """Return the share of values in each bin of `EDGES`; bins include their lower edge."""
    counts, _ = np.histogram(values, bins=EDGES)
    return (counts / max(1, len(values))).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pair-divergences"))
    parser.add_argument("--num", type=whole(1), default=40, help="problems of each family and size")
    parser.add_argument("--task", default="word_problems")
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--draft", default=None)
    arguments = parser.parse_args()
    if arguments.num < 2:
        parser.error(f"--num must be 2 or more, got {arguments.num}")
    torch.set_num_threads(1)
    pair = reprieve.load_pair(arguments.target, arguments.draft, dtype="float32")
    task = worded(parser, arguments.task)
    writer = Writer(pair, "target", task)
    found = []
    for family, size, problems in of_each_family(task, "test", arguments.num):
        texts = writer.write(problems)
        apart, agree = map(
            np.concatenate, zip(*(divergences(pair, *one) for one in zip(problems, texts, strict=True)), strict=True)
        )
        found.append(
            {
                "family": family,
                "size": size,
                "num_tokens": len(apart),
                "mean": float(apart.mean()),
                "histogram": histogram(apart),
                "agree": float(agree.mean()),
            }
        )
        print(found[-1], flush=True)
    document = {
        **asdict(Environment.here()),
        "found": found,
        "edges": EDGES,
        **shown(found),
        "command": " ".join(sys.argv),
    }
    replace_file(arguments.out / "divergences.json", json.dumps(document, indent=2) + "\n")


def shown(found: Sequence[dict]) -> dict[str, list]:
    """Return the head and rows of the table."""
    bins = [f"{low:g} to {high:g}, %" for low, high in itertools.pairwise(EDGES)]
    return {
        "head": ["family", "numbers", "tokens", "mean JS", *bins, "same token, %"],
        "rows": [
            [
                one["family"],
                one["size"],
                str(one["num_tokens"]),
                f"{one['mean']:.3f}",
                *(f"{100 * share:.1f}" for share in one["histogram"]),
                f"{100 * one['agree']:.1f}",
            ]
            for one in found
        ],
    }


if __name__ == "__main__":
    run(main)
