"""Run time of a program in the sandbox, compared with another version and with no isolation.

    git worktree add /tmp/before e4b6b89
    python benchmarks/sandbox.py --before /tmp/before/src --turns 60

Each version is a separate process that runs one program per request; versions take turns. `run` is a program that
prints a number. `graded` is a function with one test, run by `Sandbox.passes` or, in versions without it, in one
process with its test.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from reprieve.bench.results import Environment
from reprieve.files import replace_file
from reprieve.stats import bootstrap_interval

WORKER = """
import sys, time
from reprieve.tasks import sandbox as module
if sys.argv[1] != "any":
    module.MECHANISMS = [mechanism for mechanism in module.MECHANISMS if mechanism.name == sys.argv[1]]
sandbox = module.Sandbox(unsafe=sys.argv[1] == "none")
function, check = "def f(x):\\n    return x + 1\\n", "assert f(1) == 2\\n"
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    if line.strip() == "run":
        good = sandbox.run("print(1)").stdout == "1\\n"
    elif hasattr(sandbox, "passes"):
        good = sandbox.passes(function, check)
    else:
        good = sandbox.run(function + check + "print('end')").stdout == "end\\n"
    print(time.perf_counter() - began if good else "failed", flush=True)
"""


class Version:
    """Worker process of one version."""

    def __init__(self, source: Path, mode: str) -> None:
        command = [sys.executable, "-c", WORKER, mode]
        environ = {**os.environ, "PYTHONPATH": str(source)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.reply()

    def reply(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def seconds(self, what: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return float(self.reply())


def median_interval(ratios: np.ndarray) -> tuple[float, float]:
    """Return the bootstrap interval of the median over turns."""
    return bootstrap_interval(lambda draw: float(np.median(ratios[draw])), len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="the src folder of another version")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/sandbox"))
    options = parser.parse_args()
    now = Path(__file__).parents[1] / "src"
    versions = {"now": Version(now, "any"), "without isolation": Version(now, "none")}
    versions["sandlock"] = Version(now, "sandlock")
    if options.before:
        versions["before"] = Version(options.before, "any")
    times: dict[str, dict[str, list[float]]] = {what: {name: [] for name in versions} for what in ("run", "graded")}
    for turn in range(options.turns + 3):
        for what, by_version in times.items():
            for name, version in versions.items():
                seconds = version.seconds(what)
                if turn >= 3:
                    by_version[name].append(seconds)
    document = {**asdict(Environment.here()), "turns": options.turns, "seconds": times}
    for what, by_version in times.items():
        for name, values in by_version.items():
            print(f"{what}, {name}: {1000 * statistics.median(values):.0f} ms")
            if name != "now":
                ratios = np.array(by_version["now"]) / np.array(values)
                low, high = median_interval(ratios)
                print(f"  now over it: {np.median(ratios):.2f} [{low:.2f}, {high:.2f}]")
    replace_file(options.out / "sandbox.json", json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
