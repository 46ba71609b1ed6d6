"""How many problems a minute are graded by running programs, as mining asks: responses beside the target's own.

`before` runs every comparison in turn, the target's program again each time, as it was up to version 0.2; `now` runs
each program once and several at a time. HumanEval's own solutions are the target's responses; each is changed a little
for the others.

    python benchmarks/grading.py HumanEval.jsonl.gz --limit 20
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import time
from pathlib import Path

from reprieve.tasks import TaskProblem, load_task
from reprieve.tasks.programs import ProgramsTask


def before(task: ProgramsTask, cases: list[tuple[TaskProblem, str, list[str]]]) -> list[bool]:
    """One after another, without memory."""
    verdicts = []
    for problem, target, others in cases:
        for other in others:
            ours, theirs = (tuple(task.verdicts(program, problem.reference)) for program in (other, target))
            verdicts.append(ours == theirs)
    return verdicts


def now(task: ProgramsTask, cases: list[tuple[TaskProblem, str, list[str]]]) -> list[bool]:
    """As miners do: problems side by side, each program once."""

    async def of_problem(problem: TaskProblem, target: str, others: list[str]) -> list[bool]:
        return [await asyncio.to_thread(task.same, problem, other, target) for other in others]

    async def all_of() -> list[list[bool]]:
        return await asyncio.gather(*(of_problem(*case) for case in cases))

    return [verdict for verdicts in asyncio.run(all_of()) for verdict in verdicts]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--mismatches", type=int, default=10, help="responses compared with each target's")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    raw = options.path.read_bytes()
    lines = (gzip.decompress(raw) if options.path.suffix == ".gz" else raw).decode().splitlines()
    solutions = [json.loads(line)["canonical_solution"] for line in lines][: options.limit]
    speeds: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(options.turns):
        for name, grade in (("before", before), ("now", now)):
            task = load_task(f"humaneval:path={options.path}")  # with a memory of its own
            assert isinstance(task, ProgramsTask)
            problems = task.problems("test", options.limit)
            cases = [
                (problem, solution, [f"{solution}\n# {number}" for number in range(options.mismatches)])
                for problem, solution in zip(problems, solutions, strict=True)
            ]
            began = time.monotonic()
            verdicts = grade(task, cases)
            assert all(verdicts)
            speeds[name].append(60 * len(cases) / (time.monotonic() - began))
    for name, values in speeds.items():
        print(
            f"{name}: {sorted(values)[len(values) // 2]:.1f} problems a minute ({min(values):.1f} to {max(values):.1f})"
        )
    print(f"{options.limit} problems, {options.mismatches} mismatches each, {options.turns} turns")


if __name__ == "__main__":
    main()
