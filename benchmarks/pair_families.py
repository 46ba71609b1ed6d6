"""Accuracy of a bundled pair's models by family: `python benchmarks/pair_families.py --task word_problems --target T`.

Solves validation problems of each family with small and with large numbers, and percentages also with round numbers.
A task's mixture (`reprieve.tasks.word_problems`) is chosen from this table, before any rule is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import reprieve
from arms import run, whole
from pair_report import Writer
from reprieve.bench.results import Environment
from reprieve.files import replace_file
from reprieve.tasks import TaskProblem, load_task
from reprieve.tasks.families import FAMILIES
from reprieve.tasks.word_problems import ArithmeticTask, draw_problem


def of_each_family(
    task: ArithmeticTask, split: str, num: int, families: Iterable[str] = FAMILIES
) -> Iterator[tuple[str, str, list[TaskProblem]]]:
    """Yield each family with each size of numbers and `num` problems of both; fewer for round percentages."""
    for family in families:
        for size in ("small", "large", *(["round"] if family == "share" else [])):
            contents = dataclasses.replace(
                task.contents,
                family_weights={family: 1.0},
                large_share=float(size == "large"),
                large_shares={},
                round_share=float(size == "round"),
            )
            drawn = [draw_problem(split, index, contents=contents) for index in range(num)]
            if size == "round":
                drawn = [problem for problem in drawn if len(problem.steps) > 1]
            yield family, size, [*drawn]


def worded(parser: argparse.ArgumentParser, name: str) -> ArithmeticTask:
    """Load a bundled pair's task; exit on any other."""
    task = load_task(name)
    if not isinstance(task, ArithmeticTask):
        parser.error(f"--task must be one of a bundled pair, arithmetic or word_problems, got {name!r}")
    return task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/pair-families"))
    parser.add_argument("--num", type=whole(1), default=60, help="problems of each family and size")
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--task", default="word_problems")
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--draft", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = reprieve.load_pair(arguments.target, arguments.draft, dtype="float32")
    task = worded(parser, arguments.task)
    writers = {role: Writer(pair, role, task) for role in ("target", "draft")}
    found = []
    for family, size, problems in of_each_family(task, "validation", arguments.num, arguments.families):
        solved = {
            role: [writer.solved(*one) for one in zip(problems, writer.write(problems), strict=True)]
            for role, writer in writers.items()
        }
        solved["either"] = [a or b for a, b in zip(solved["target"], solved["draft"], strict=True)]
        shares = {role: sum(values) / len(values) for role, values in solved.items()}
        found.append({"family": family, "size": size, "num": len(problems), **shares})
        print(found[-1], flush=True)
    head = ["family", "numbers", "problems", "target, %", "draft, %", "either, %"]
    rows = [
        [
            one["family"],
            one["size"],
            str(one["num"]),
            *(f"{100 * one[role]:.0f}" for role in ("target", "draft", "either")),
        ]
        for one in found
    ]
    document = {
        **dataclasses.asdict(Environment.here()),
        "found": found,
        "head": head,
        "rows": rows,
        "command": " ".join(sys.argv),
    }
    replace_file(arguments.out / "families.json", json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
