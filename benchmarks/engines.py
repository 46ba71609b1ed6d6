"""Comparison of `--engine vllm` with the local engine on a bundled pair (needs vLLM; see docs/guides/engines.md).

- `agree`: the same arms, problems and K on both: problems solved, equal answers, tokens per round;
- `sweep`: all thresholds in one run, compared with one run each: equal answers, and the time of both;
- `mine`: AutoJudge's labels of both, and seconds per problem; with `--rollouts 8`, PAD's labels;
- `load`: tokens per second at 1, 8 and 32 concurrent requests, as in `reprieve bench --concurrency`, without the arms
  that need their own servers.

    .venv-vllm/bin/python benchmarks/engines.py agree --limit 200 --out runs/engines

Each writes result.json, which `tables.py` renders.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arms import bundled, over, part, run, whole, write_parts
from reprieve.backends.served import ServedEngine
from reprieve.backends.settings import EngineSettings
from reprieve.backends.throughput import measure_throughput
from reprieve.bench.arms import Arm, make_arms
from reprieve.bench.engine import Engine, RunConfig
from reprieve.bench.records import ProblemRecord
from reprieve.bench.run import Run
from reprieve.bench.settings import RunSettings, SpeedSettings
from reprieve.cli.screen import make_engine
from reprieve.mining.building import build
from reprieve.mining.runner import mine_problems
from reprieve.mining.settings import AutoJudgeMining, MiningSettings, PivotMining
from reprieve.mining.store import LabelStore
from reprieve.settings import PairSettings
from reprieve.stats import paired_difference
from reprieve.tasks import Task, load_task
from reprieve.tasks.prompting import with_prompts

VLLM = "vllm:max_model_len=512,max_num_seqs=64"
ENGINES = ("local", VLLM)
K = 8
THRESHOLDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
Parts = Mapping[str, Mapping[str, Any]]
Records = dict[tuple[str, str], ProblemRecord]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A pair, its task, the number of problems and the output folder."""

    pair: PairSettings
    task: str
    limit: int
    out: Path

    def arms(self, *specs: str) -> list[Arm]:
        """Return arms at this file's K, including lossless."""
        return [arm for arm in make_arms(specs, [K], target=self.pair.target) if arm.rule is not None]

    def answer(self, engine_name: str, arms: Sequence[Arm], folder: str) -> Records:
        """Return records by arm and problem; resumes from the folder."""
        engine = make_engine(EngineSettings(engine_name), self.pair)
        try:
            run = Run(self.config(engine, arms), arms, engine, self.task_for(engine), self.out / folder)
            if not run.measure():
                raise KeyboardInterrupt
        finally:
            engine.close()
        return {(record.arm, record.problem_id): record for record in run.records}

    def config(self, engine: Engine, arms: Sequence[Arm]) -> RunConfig:
        return RunConfig.of(engine, arms, RunSettings(task=self.task, limit=self.limit))

    def task_for(self, engine: Engine) -> Task:
        return with_prompts(load_task(self.task), engine.tokenizer)


def agree(measurement: Measurement) -> Parts:
    """Compare each arm on both engines."""
    arms = measurement.arms("judge:threshold=0.214", "judge:threshold=0.1", "pivot", "margin:delta=2")
    local, served = (measurement.answer(name, arms, name.partition(":")[0]) for name in ENGINES)
    rows = []
    for arm in arms:
        pairs = [(record, served[key]) for key, record in local.items() if key[0] == arm.label]
        sides = list(zip(*pairs, strict=True))
        local_correct, served_correct = ([float(record.correct) for record in side] for side in sides)
        tokens = [sum(one.num_tokens for one in side) / sum(one.num_rounds for one in side) for side in sides]
        rows.append(
            [
                f"`{arm.label}`",
                f"{100 * np.mean(local_correct):.1f}, {100 * np.mean(served_correct):.1f}",
                over(paired_difference(served_correct, local_correct), 1, 100),
                sum(left.answer == right.answer for left, right in pairs),
                sum(left.text == right.text for left, right in pairs),
                f"{tokens[0]:.2f}, {tokens[1]:.2f}",
            ]
        )
    head = [
        "arm",
        "solved, local and vLLM, %",
        "difference, points",
        "same final answer",
        "same text",
        "tokens per round, local and vLLM",
    ]
    return {
        "agree": part(head, rows, f"{measurement.limit} test problems, greedy, K = {K}; brackets are 95% intervals.")
    }


def sweep(measurement: Measurement) -> Parts:
    """Measure thresholds in one run, and in one run each with its own server."""
    specs = [f"judge:threshold={value}" for value in THRESHOLDS]
    began = time.monotonic()
    together = measurement.answer(VLLM, measurement.arms(*specs), "together")
    seconds = [time.monotonic() - began]
    began = time.monotonic()
    alone: Records = {}
    for number, spec in enumerate(specs):
        alone |= measurement.answer(VLLM, measurement.arms(spec), f"alone-{number}")
    seconds.append(time.monotonic() - began)
    same = sum(together[key].text == record.text for key, record in alone.items())
    rows = [["one run, one server", 1, f"{seconds[0]:.0f}"], ["a run each", len(specs), f"{seconds[1]:.0f}"]]
    note = f"{len(specs)} thresholds of `judge` and `lossless`, {measurement.limit} problems; {same} of {len(alone)} "
    return {"sweep": part(["thresholds by", "starts of vLLM", "seconds"], rows, f"{note}answers are the same text.")}


def load(measurement: Measurement) -> Parts:
    """Measure speed under load; arms take turns on one server."""
    arms = measurement.arms("judge:threshold=0.214", "judge:threshold=0.1", "margin:delta=2", "typical")
    speed = SpeedSettings(concurrency=(1, 8, 32), turns=5)
    engine = make_engine(EngineSettings(VLLM), measurement.pair)
    try:
        assert isinstance(engine, ServedEngine)
        measurement.out.mkdir(parents=True, exist_ok=True)
        config, task = measurement.config(engine, arms), measurement.task_for(engine)
        found = measure_throughput(engine, config, task, arms, speed, measurement.out)
    finally:
        engine.close()
    rows = []
    for arm in arms:
        cells = [cell for cell in found if cell.arm == arm.label]
        ratios = [over([cell.vs_lossless or 0.0, *(cell.vs_lossless_ci95 or ())], 2) for cell in cells]
        rows.append([f"`{arm.label}`", *ratios, f"{cells[0].tokens_per_step:.1f}"])
    head = ["arm", *(f"{level} at once" for level in speed.concurrency), "tokens per step"]
    counts = ", ".join(str(cell.num_requests) for cell in cells)
    note = f"Tokens per second over lossless in the same turn, medians of {speed.turns} turns and their 95% intervals"
    return {"load": part(head, rows, f"{note}; K = {K}, {counts} requests a turn.")}


def mine(measurement: Measurement, num_rollouts: int) -> Parts:
    """Compare the labels of both engines and the time that they take."""
    settings: MiningSettings
    if num_rollouts:
        settings = PivotMining(
            task=measurement.task, limit=measurement.limit, pair=measurement.pair, num_rollouts=num_rollouts
        )
    else:
        settings = AutoJudgeMining(task=measurement.task, limit=measurement.limit, pair=measurement.pair)
    mined, rows = [], []
    for name in ENGINES:
        bench = build(dataclasses.replace(settings, engine=EngineSettings(name)))
        num_in_flight = 64 if name == VLLM else settings.in_flight
        try:
            store = LabelStore(measurement.out / f"labels-{settings.miner}-{name.partition(':')[0]}", bench.manifest)
            began = time.monotonic()
            report = mine_problems(bench.miner, bench.problems, store, num_in_flight=num_in_flight)
            seconds = (time.monotonic() - began) / max(1, report.num_mined)
        finally:
            bench.close()
        problems = {problem.problem_id: problem for problem in store.problems()}
        mined.append(problems)
        labels = [label for problem in problems.values() for label in problem.labelled()]
        important = sum(bool(label.important) for label in labels)
        rows.append([name.partition(":")[0], num_in_flight, len(problems), len(labels), important, f"{seconds:.2f}"])
    both = [(problem, mined[1][name]) for name, problem in mined[0].items() if name in mined[1]]
    alike = [(local, served) for local, served in both if local.target_ids == served.target_ids]
    same = sum(local.mismatches == served.mismatches for local, served in alike)
    head = ["engine", "problems in flight", "problems", "labels", "important", "seconds a problem"]
    note = f"The target's answer is the same in {len(alike)} of {len(both)} problems, the labels in {same} of these."
    return {f"mine_{settings.miner}": part(head, rows, note)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("agree", "sweep", "load", "mine"))
    parser.add_argument("--target", type=bundled, default="reprieve/miniature", help="name of a bundled pair")
    parser.add_argument("--limit", type=whole(1), default=200)
    parser.add_argument("--rollouts", type=whole(0), default=0, help="mine PAD's labels with this many rollouts")
    parser.add_argument("--out", type=Path, default=Path("runs/engines"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = PairSettings(options.target.name, dtype="float32")
    measurement = Measurement(pair, options.target.task, options.limit, options.out)
    jobs: dict[str, Callable[[], Parts]] = {
        "agree": lambda: agree(measurement),
        "sweep": lambda: sweep(measurement),
        "load": lambda: load(measurement),
        "mine": lambda: mine(measurement, options.rollouts),
    }
    write_parts(options.out / "result.json", jobs[options.what]())


if __name__ == "__main__":
    run(main)
