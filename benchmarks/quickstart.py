"""Reproducibility of `reprieve quickstart` on a bundled pair, with its problems as a user's data file.

One run is uninterrupted, a second one in another folder is interrupted several times; both must mine the same labels,
train the same head, test the same thresholds and write the same certificate.

    python benchmarks/quickstart.py --out runs/quickstart-twice
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arms import bundled, run, whole
from reprieve.bundles import Bundle
from reprieve.files import replace_file
from reprieve.identity import digest
from reprieve.mining.store import LabelStore
from reprieve.tasks import load_task

QUESTION = "Question: {question}\nAnswer:"


def write_data(folder: Path, bundle: Bundle, num_problems: int) -> list[str]:
    """Write a bundled pair's problems as a user's data file; return the flags for the pair and the file."""
    task = load_task(bundle.task)
    problems = task.problems("train", num_problems)
    rows = [{"question": problem.question, "answer": problem.reference} for problem in problems]
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "questions.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    replace_file(folder / "prompt.txt", QUESTION)
    data = ["--data", str(folder / "questions.jsonl"), "--prompt-template", str(folder / "prompt.txt")]
    return ["--target", bundle.name, *data, "--grader", "number", "--max-new-tokens", str(task.max_new_tokens)]


def run_to_end(flags: Sequence[str], out: Path, interrupts: Sequence[float] = ()) -> float:
    """Run quickstart to its end, with Ctrl-C after each time in `interrupts`; return the total seconds.

    Raises:
        SystemExit: an unexpected exit status.
    """
    command = [sys.executable, "-m", "reprieve.cli.main", "quickstart", *flags, "--out", str(out)]
    began = time.monotonic()
    for seconds in (*interrupts, None):
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # to the whole process group, as a terminal does
            if process.wait() != 130:
                sys.exit(f"{out}: status {process.returncode} when interrupted, expected 130")
            continue
        if status != 0:
            sys.exit(f"{out}: status {status}")
        break
    return time.monotonic() - began


def result_of(out: Path) -> dict[str, Any]:
    """Return the parts of a result that must not differ between runs."""
    certificate = json.loads(next((out / "certificates").glob("judge-*.json")).read_text())
    problems = [dataclasses.replace(labels, seconds=0.0) for labels in LabelStore(out / "labels").problems()]
    if not problems:
        sys.exit(f"{out}: no labels were mined")
    labels = sorted(str(problem) for problem in problems)
    weights = {path.name: digest(path.read_bytes()) for path in sorted((out / "head").glob("*.safetensors"))}
    parts = {name: certificate[name] for name in ("threshold", "verdict", "promise", "calibration", "held_out")}
    return {"labels": digest("\n".join(labels).encode()), "head": weights, **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=bundled, default="reprieve/miniature", help="name of a bundled pair")
    parser.add_argument("--problems", type=whole(1), default=2400)
    parser.add_argument("--interrupts", type=float, nargs="*", default=[90, 240, 200], help="seconds after each start")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-twice"))
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    flags = write_data(chosen.out, chosen.target, chosen.problems)
    seconds = [
        run_to_end(flags, chosen.out / name, stops)
        for name, stops in (("whole", []), ("interrupted", chosen.interrupts))
    ]
    both = [result_of(chosen.out / name) for name in ("whole", "interrupted")]
    differing = [key for key in both[0] if both[0][key] != both[1][key]]
    for name, time_taken in zip(("whole", f"interrupted {len(chosen.interrupts)} times"), seconds, strict=True):
        print(f"{name}: {time_taken / 60:.1f} min")
    stages = json.loads((chosen.out / "whole" / "quickstart.json").read_text())["stages"]
    print("stages:", ", ".join(f"{stage['name']} {stage['seconds']:.0f} s" for stage in stages))
    print("the same result" if not differing else f"DIFFERENT: {', '.join(differing)}")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    run(main)
