"""What `--engine vllm` measures beside the local engine, on the bundled pair (needs vLLM; see docs/guides/engines.md).

- `agree`: the same arms, problems and K on both: who solves what, which answers are the same, tokens a round;
- `sweep`: all thresholds in one run beside one run each: the same answers, and the time of both;
- `mine`: AutoJudge's labels from both, and seconds a problem; `--rollouts 8` for PAD's speed.

- `load`: tokens a second at 1, 8 and 32 requests at once, as `reprieve bench --concurrency` has it, without the arms
  that need servers of their own.

    python benchmarks/engines.py agree --limit 200 --out runs/engines
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from reprieve.evaluation.arms import Arm, make_arms
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.engines.base import Engine
from reprieve.evaluation.engines.making import make_engine
from reprieve.evaluation.engines.served import ServedEngine
from reprieve.evaluation.records import ProblemRecord
from reprieve.evaluation.runner import Runner
from reprieve.evaluation.settings import RunSettings, SpeedSettings
from reprieve.evaluation.throughput import measure_throughput
from reprieve.files import replace_file
from reprieve.labelling.recipes import build
from reprieve.labelling.runner import mine_problems
from reprieve.labelling.settings import AutoJudgeMining, MiningSettings, PivotMining
from reprieve.labelling.store import LabelStore
from reprieve.metrics import paired_difference
from reprieve.servers.settings import EngineSettings
from reprieve.settings import PairSettings
from reprieve.tasks import load_task
from reprieve.tasks.asking import ask

PAIR = PairSettings("reprieve/arithmetic-pair", dtype="float32")
VLLM = "vllm:max_model_len=512,max_num_seqs=64"
K = 8


def arms_of(*specs: str) -> list[Arm]:
    return [arm for arm in make_arms(specs, [K], target=PAIR.target) if arm.rule is not None]


def answered(engine: Engine, arms: Sequence[Arm], limit: int, folder: Path) -> dict[tuple[str, str], ProblemRecord]:
    """Records by arm and problem."""
    task = ask(load_task("arithmetic"), engine.tokenizer)
    runner = Runner(RunConfig.of(engine, arms, RunSettings(task="arithmetic", limit=limit)), arms, engine, task, folder)
    if not runner.measure():
        raise KeyboardInterrupt
    return {(record.arm, record.problem_id): record for record in runner.records}


def agree(options: argparse.Namespace) -> dict[str, Any]:
    """Each arm on both engines."""
    arms = arms_of("judge:threshold=0.04", "judge:threshold=0.1", "margin:delta=2")
    made = {}
    for name in ("local", VLLM):
        engine = make_engine(EngineSettings(name), PAIR)
        try:
            made[name] = answered(engine, arms, options.limit, options.out / name.partition(":")[0])
        finally:
            engine.close()
    rows = {}
    for arm in arms:
        pairs = [(made["local"][key], made[VLLM][key]) for key in made["local"] if key[0] == arm.label]
        solved = [[float(pair[side].correct) for pair in pairs] for side in (0, 1)]
        rows[arm.label] = {
            "n": len(pairs),
            "solved": [sum(side) / len(side) for side in solved],
            "difference": paired_difference(solved[1], solved[0]),
            "same_answers": sum(ours.answer == theirs.answer for ours, theirs in pairs) / len(pairs),
            "same_texts": sum(ours.text == theirs.text for ours, theirs in pairs) / len(pairs),
            "tokens_per_round": [
                sum(pair[side].num_tokens for pair in pairs) / sum(pair[side].num_rounds for pair in pairs)
                for side in (0, 1)
            ],
        }
    return rows


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Thresholds together and one by one, each of these with a server of its own."""
    specs = [f"judge:threshold={value}" for value in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)]
    began = time.monotonic()
    together = _run(arms_of(*specs), options, "together")
    seconds = {"together": time.monotonic() - began}
    began = time.monotonic()
    alone: dict[tuple[str, str], ProblemRecord] = {}
    for number, spec in enumerate(specs):
        alone |= _run(arms_of(spec), options, f"alone-{number}")
    seconds["one_each"] = time.monotonic() - began
    same = sum(together[key].text == record.text for key, record in alone.items())
    return {"seconds": seconds, "n": len(alone), "same_answers": same / len(alone)}


def _run(arms: Sequence[Arm], options: argparse.Namespace, name: str) -> dict[tuple[str, str], ProblemRecord]:
    engine = make_engine(EngineSettings(VLLM), PAIR)
    try:
        return answered(engine, arms, options.limit, options.out / name)
    finally:
        engine.close()


def load(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Speed under load, arms in turns on one server."""
    arms = arms_of("judge:threshold=0.04", "margin:delta=2", "typical")
    engine = make_engine(EngineSettings(VLLM), PAIR)
    try:
        task = ask(load_task("arithmetic"), engine.tokenizer)
        config = RunConfig.of(engine, arms, RunSettings(task="arithmetic", limit=options.limit))
        assert isinstance(engine, ServedEngine)
        speed = SpeedSettings(concurrency=(1, 8, 32), turns=3)
        options.out.mkdir(parents=True, exist_ok=True)
        return measure_throughput(engine, config, task, arms, speed, options.out)
    finally:
        engine.close()


def mine(options: argparse.Namespace) -> dict[str, Any]:
    """Labels of both engines, and how long they took."""
    settings: MiningSettings = AutoJudgeMining(task="arithmetic", limit=options.limit, pair=PAIR)
    if options.rollouts:
        settings = PivotMining(task="arithmetic", limit=options.limit, pair=PAIR, num_rollouts=options.rollouts)
    made, seconds = {}, {}
    for name in ("local", VLLM):
        bench = build(dataclasses.replace(settings, answering=EngineSettings(name)))
        try:
            folder = options.out / f"labels-{settings.miner}-{name.partition(':')[0]}"
            store = LabelStore(folder, bench.manifest)
            began = time.monotonic()
            report = mine_problems(
                bench.miner, bench.problems, store, num_in_flight=64 if name == VLLM else settings.in_flight
            )
            seconds[name] = (time.monotonic() - began) / max(1, report.num_mined)
        finally:
            bench.close()
        made[name] = {problem.problem_id: problem for problem in store.problems()}
    both = [(problem, made[VLLM][name]) for name, problem in made["local"].items()]
    greedy = [(ours, theirs) for ours, theirs in both if ours.target_ids == theirs.target_ids]
    same = [ours.mismatches == theirs.mismatches for ours, theirs in greedy]
    return {
        "n": len(both),
        "labels": [sum(len(pair[side].labelled()) for pair in both) for side in (0, 1)],
        "important": [sum(bool(item.important) for pair in both for item in pair[side].labelled()) for side in (0, 1)],
        "same_greedy_answer": len(greedy),
        "of_these_same_labels": sum(same),
        "seconds_per_problem": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("agree", "sweep", "load", "mine"))
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=0, help="mine PAD's labels with so many rollouts")
    parser.add_argument("--out", type=Path, default=Path("runs/engines"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out = options.out / (f"{options.what}-{options.rollouts}" if options.rollouts else options.what)
    jobs: dict[str, Callable[[argparse.Namespace], Any]] = {"agree": agree, "sweep": sweep, "load": load, "mine": mine}
    result = jobs[options.what](options)
    text = json.dumps(result, indent=2)
    replace_file(options.out / "result.json", text + "\n")
    print(text)


if __name__ == "__main__":
    main()
