"""Test of the code sandbox: HumanEval's canonical solutions must pass, mutants must fail.

    python benchmarks/humaneval.py --path HumanEval.jsonl.gz

Mutants change every returned value (all must fail) or the first whole number by one (some are equivalent programs).
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from dataclasses import asdict
from pathlib import Path

from reprieve.bench.results import Environment
from reprieve.files import replace_file
from reprieve.tasks import load_task
from reprieve.tasks.table import read_jsonl


class WrongReturns(ast.NodeTransformer):
    """Replace `return x` with `return [x, 'wrong']`."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value = node.value or ast.Constant(None)
        return ast.Return(ast.List([value, ast.Constant("wrong")], ast.Load()))


class OffByOne(ast.NodeTransformer):
    """Add one to the first whole number."""

    changed = False

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if self.changed or not isinstance(node.value, int) or isinstance(node.value, bool):
            return node
        self.changed = True
        return ast.Constant(node.value + 1)


def mutant(program: str, entry_point: str, change: ast.NodeTransformer) -> str | None:
    """Return the program with its function mutated; None if nothing changed."""
    tree = ast.parse(program)
    before = ast.unparse(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            change.visit(node)
    after = ast.unparse(ast.fix_missing_locations(tree))
    return None if after == before else after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True)
    parser.add_argument("--limit", type=int, default=164)
    parser.add_argument("--out", type=Path, default=Path("runs/humaneval"))
    given = parser.parse_args()
    task = load_task(f"humaneval:path={given.path},seconds=10")
    rows = [row for _, row in read_jsonl(Path(given.path))][: given.limit]
    counts = {name: [0, 0] for name in ("canonical", "wrong returns", "off by one")}  # passed, all
    wrong = []
    started = time.perf_counter()
    for row, problem in zip(rows, task.problems("test", given.limit), strict=True):
        program = row["prompt"] + row["canonical_solution"]
        versions = {
            "canonical": row["canonical_solution"],
            "wrong returns": mutant(program, row["entry_point"], WrongReturns()),
            "off by one": mutant(program, row["entry_point"], OffByOne()),
        }
        for name, answer in versions.items():
            if answer is None:
                continue
            passed = task.equivalent(answer, problem.reference)
            counts[name][0] += passed
            counts[name][1] += 1
            if passed != (name == "canonical") and name != "off by one":
                wrong.append((problem.problem_id, name))
    document = {
        "passed_of": counts,
        "wrong": wrong,
        "seconds": time.perf_counter() - started,
        **asdict(Environment.here()),
    }
    replace_file(given.out / "humaneval.json", json.dumps(document, indent=2) + "\n")
    print(json.dumps({"passed_of": counts, "wrong": wrong}))


if __name__ == "__main__":
    main()
