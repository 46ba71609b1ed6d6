"""Robustness against hostile input and kills: cases tried, handled and failed, by group.

    python benchmarks/hostile.py --kills 200

Each group is a set of tests with many cases. SIGKILL hits mining, training, measuring, certifying and reporting on the
bundled pair at random moments, mostly after the first finished problem. Every remaining file must be readable, and the
command, run again to its end, must give the result of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from reprieve.files import parse_json, read_json, replace_file, whole_lines
from reprieve.mining.store import LabelStore

GROUPS = {
    "sandbox: escapes": ("tests/tasks/test_sandbox.py", "escapes"),
    "grader: forgeries": ("tests/tasks/test_sandbox.py", "forged or leaving_early"),
    "artefacts: heads, certificates": ("tests/heads", "hostile or tampered or refused"),
    "pairs: model folders": ("tests/models/test_loading.py", ""),
    "files: JSON, gzip, pipes": ("tests/test_files.py", "not options and not command"),
    "command line": ("tests/test_files.py tests/cli/test_main.py tests/cli/test_flags.py", "options or line or usage"),
    "label store": ("tests/mining/test_store.py", ""),
    "server": ("tests/playground tests/engine/test_text.py", ""),
}  # fmt: skip
PAIR = ["--target", "reprieve/miniature"]
LABELS = ["mine", "autojudge", *PAIR, "--limit", "6", "--in-flight", "2", "--dtype", "float32"]
JOBS = {
    "mine": LABELS,
    "train": ["train", "judge", *PAIR, "--dtype", "float32", "--labels", "LABELS"],
    "bench": ["bench", *PAIR, "--arm", "margin", "--num-draft-tokens", "6", "--limit", "6", "--dtype", "float32"],
    "certify": [
        "certify", *PAIR, "--rule", "margin", "--thresholds", "1,2", "--num-draft-tokens", "6", "--limit", "6",
        "--held-out-limit", "6", "--max-drop", "0.9", "--dtype", "float32",
    ],
    "report": ["report", "BENCH"],
}  # fmt: skip


@dataclass
class Job:
    """One command with its own output folder."""

    name: str
    arguments: list[str]
    out: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command in its own process group."""
        command = [sys.executable, "-m", "reprieve.cli.main", *self.arguments, "--out", str(self.target)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=quiet, stderr=quiet)

    @property
    def target(self) -> Path:
        return self.out / "page.html" if self.name == "report" else self.out

    def finish(self) -> float:
        """Run the command to its end and return the seconds."""
        began = time.monotonic()
        if status := self.start().wait(600):
            raise SystemExit(f"{self.name}: exit status {status}")
        return time.monotonic() - began

    def result(self) -> Any:
        """Return the part of the result that must not depend on kills."""
        if self.name == "mine":
            return [(item.problem_id, item.response_ids, item.mismatches) for item in LabelStore(self.out).problems()]
        if self.name == "train":
            return {name: tensor.tolist() for name, tensor in load_file(self.out / "model.safetensors").items()}
        if self.name == "report":
            return len(self.target.read_bytes()) > 10_000
        if self.name == "certify":
            found = [read_json(path, "file") for path in sorted(self.out.glob("*.json"))]
            return [item["calibration"]["steps"] for item in found if item.get("kind") == "reprieve certificate"]
        lines = [parse_json(line) for line in whole_lines(self.out / "problems.jsonl")]
        return sorted((line["arm"], line["problem_id"], line["text"]) for line in lines)

    def broken(self) -> list[str]:
        """Return the unreadable files, each with its error."""
        found = []
        for path in self.out.rglob("*"):
            if not path.is_file() or path.name.endswith(".tmp"):
                continue
            try:
                if path.suffix == ".json":
                    json.loads(path.read_text())
                elif path.suffix == ".safetensors":
                    load_file(path)
                elif path.suffix == ".jsonl":
                    for line in path.read_bytes().split(b"\n")[:-1]:
                        json.loads(line or b"0")
                elif path.suffix == ".html" and b"</html>" not in path.read_bytes():
                    raise ValueError("half a page")
            except Exception as error:
                found.append(f"{path.name}: {error}")
        if self.name == "mine" and (self.out / "manifest.json").exists():
            LabelStore(self.out).problems()
        return found


def kills(folder: Path, names: list[str], count: int, seed: int) -> dict[str, dict[str, int]]:
    """Kill the commands `count` times in total; return the kills tried, handled and failed."""
    draw, rows = random.Random(seed), {}
    shutil.rmtree(folder, ignore_errors=True)
    clean, killed = folder / "whole", folder / "cut"
    if "report" in names and "bench" not in names:
        Job("bench", JOBS["bench"], clean / "bench").finish()  # a run to report on
    for name in names:
        folders = {
            "LABELS": str(Path(__file__).with_name("labels") / "miniature-autojudge"),
            "BENCH": str(clean / "bench"),
        }
        given = [folders.get(word, word) for word in JOBS[name]]
        reference = Job(name, given, clean / name)
        seconds = reference.finish()
        job = Job(name, given, killed / name)
        row = {"tried": 0, "handled": 0, "failed": 0}
        while row["tried"] < count // len(names):
            process, began = job.start(), time.monotonic()
            try:
                process.wait(draw.uniform(0.35, 1.0) * seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            else:
                # It finished before the kill: start over, and kill sooner.
                shutil.rmtree(job.out, ignore_errors=True)
                seconds = min(seconds, time.monotonic() - began)
                continue
            row["tried"] += 1
            broken = job.broken()
            row["failed" if broken else "handled"] += 1
            for line in broken:
                print(f"{name}: {line}", flush=True)
        job.finish()
        same = job.result() == reference.result()
        leftovers = [path.name for path in job.out.rglob("*.tmp")]
        row["failed"] += not same
        print(f"{name}: {row}, same result: {same}, left behind: {leftovers}", flush=True)
        rows[f"kills: {name}"] = row
    return rows


def tests(folder: Path) -> dict[str, dict[str, int]]:
    """Run the groups of tests; return the cases tried, handled and failed."""
    rows = {}
    for name, (paths, chosen) in GROUPS.items():
        report = folder / "group.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *paths.split(),
            f"--junitxml={report}",
            "-p",
            "no:cacheprovider",
        ]
        subprocess.run([*command, *(["-k", chosen] if chosen else [])], stdout=subprocess.DEVNULL, check=False)
        suite = next(ElementTree.parse(report).iter("testsuite"))
        tried = int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        rows[name] = {"tried": tried, "handled": tried - failed, "failed": failed}
        print(f"{name}: {rows[name]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=list(JOBS), help="commands to kill")
    parser.add_argument("--only", choices=("tests", "kills"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/hostile"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = {} if options.only == "kills" else tests(options.out)
    if options.only != "tests":
        rows |= kills(options.out / "kills", options.jobs, options.kills, options.seed)
    total = {key: sum(row[key] for row in rows.values()) for key in ("tried", "handled", "failed")}
    for name, row in [*rows.items(), ("all", total)]:
        print(f"| {name} | {row['tried']} | {row['handled']} | {row['failed']} |")
    replace_file(options.out / "hostile.json", json.dumps({**rows, "all": total}, indent=2) + "\n")
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
