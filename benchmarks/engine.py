"""Speed of the engine, compared with transformers' decoding: `python benchmarks/engine.py --out runs/benchmark`.

All decoders run in one process and answer every problem, in rotating order, after a warm-up. Ratios are medians over
problems of the ratio on the same problem, with a bootstrap interval. Memory and the effect of a busy core are measured
in separate processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import reprieve
from arms import over, part, run, task_of, whole, write_parts
from reprieve.engine import Pair
from reprieve.models.cached_model import CachedModel, forward_seconds
from reprieve.stats import bootstrap_interval
from reprieve.types import PARTS

KS = (8, 12, 16, 24)
RULES = {"lossless": "lossless", "judge": "judge", "margin": "margin:delta=2", "state arbiter": "state_arbiter"}
EAGLE = {"EAGLE-3 tree": "eagle3", "EAGLE-3 chain": "eagle3:top_k=1"}  # lossless, with the target's bundled head
AIMS = {"lossless": "4.3", "judge": "5.6", "margin": "4.8", "state arbiter": "5.5"}  # `auto` over target-only
WARM_UP = 3  # problems
CACHED = 128  # cached tokens before a separately timed forward


class Forwards:
    """Times of single forwards after 128 cached tokens, measured again after every problem because speeds drift."""

    def __init__(self, pair: Pair) -> None:
        models = {"draft": pair.cached_draft(), "target": pair.cached_target()}
        library = {f"{name}, through transformers": CachedModel(getattr(pair, name), direct=False) for name in models}
        self.forwards = [(name, model, 1) for name, model in (models | library).items()]
        self.forwards += [(f"target, {k + 1} tokens", models["target"], k + 1) for k in KS]
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def measure(self, repeats: int = 3) -> None:
        for name, model, num_new in self.forwards:
            self.seconds[name] += [forward_seconds(model, num_new, num_cached=CACHED) for _ in range(repeats)]

    def medians(self) -> dict:
        """Return median milliseconds of each forward, and of the forwards of a round of K together."""
        ms = {name: 1000 * statistics.median(times) for name, times in self.seconds.items()}
        return ms | {f"K = {k}": k * ms["draft"] + ms[f"target, {k + 1} tokens"] for k in KS}


def transformers_decoder(pair: Pair, max_new_tokens: int, **options):
    """Return a decoder that calls `generate`; assistant options go to the draft's own generation configuration."""
    assistant = {name: options.pop(name) for name in list(options) if name.startswith(("num_assistant", "assistant_c"))}
    if assistant:
        options["assistant_model"] = pair.draft

    def decode(prompt: str) -> list[int]:
        for name, value in assistant.items():
            setattr(pair.draft.generation_config, name, value)
        ids = pair.tokenizer(prompt, return_tensors="pt").input_ids.to(pair.target.device)
        with torch.inference_mode():
            output = pair.target.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, **options)
        for name in assistant:  # a schedule continues from the previous answer's value
            assistant[name] = getattr(pair.draft.generation_config, name)
        return output[0, ids.shape[1] :].tolist()

    return decode


def peers(pair: Pair, max_new_tokens: int) -> dict:
    """Return transformers' decoders: plain, assisted (default, heuristic and constant K) and prompt lookup."""
    defaults = dict(num_assistant_tokens=20, assistant_confidence_threshold=0.4)
    constant = dict(num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    return {
        "transformers plain": transformers_decoder(pair, max_new_tokens),
        "transformers assisted, as it comes": transformers_decoder(
            pair, max_new_tokens, **defaults, num_assistant_tokens_schedule="constant"
        ),
        "transformers assisted, heuristic": transformers_decoder(
            pair, max_new_tokens, **defaults, num_assistant_tokens_schedule="heuristic"
        ),
        **{
            f"transformers assisted, K = {k}": transformers_decoder(
                pair, max_new_tokens, num_assistant_tokens=k, **constant
            )
            for k in KS
        },
        "transformers prompt lookup": transformers_decoder(pair, max_new_tokens, prompt_lookup_num_tokens=10),
    }


class Ours:
    """One of our decoders, with statistics of its rounds."""

    def __init__(self, pair: Pair, rule: str, k: int | str, max_new_tokens: int, drafter: str = "draft") -> None:
        self.decoder = pair.decoder(rule, num_draft_tokens=k, drafter=drafter)
        self.params = reprieve.SamplingParams(max_new_tokens=max_new_tokens)
        self.generations: list = []

    def __call__(self, prompt: str) -> list[int]:
        self.generations.append(self.decoder.generate(prompt, self.params, timed=True))
        return self.generations[-1].token_ids

    def rounds(self) -> dict:
        """Return means over all rounds except those of the warm-up."""
        generations = self.generations[WARM_UP:]
        rounds, drafted = (sum(getattr(one, name) for one in generations) for name in ("num_rounds", "num_drafted"))
        parts = {part: 1000 * sum(one.seconds_by_part[part] for one in generations) / max(1, rounds) for part in PARTS}
        # The first round of an answer reads the prompt, which counts as `prefill`.
        parts["verify"] *= rounds / max(1, rounds - len(generations))
        round_ms = sum(parts.values()) - parts["prefill"]
        return {
            "tokens_per_round": sum(len(one.tokens) for one in generations) / max(1, rounds),
            "drafted_per_round": drafted / max(1, rounds),
            "accepted_share": sum(one.num_accepted for one in generations) / max(1, drafted),
            "round_ms": round_ms,
            "round_ms_by_part": parts,
        }


def measure(pair: Pair, num_problems: int) -> dict:
    """Measure all decoders on the same problems."""
    task = task_of(pair)
    decoders = {"target_only": Ours(pair, "target_only", "auto", task.max_new_tokens)}
    for name, rule in RULES.items():
        decoders |= {f"{name}, K = {k}": Ours(pair, rule, k, task.max_new_tokens) for k in (*KS, "auto")}
    for name, drafter in EAGLE.items():
        decoders[f"{name}, K = auto"] = Ours(pair, "lossless", "auto", task.max_new_tokens, drafter)
    ways = {**peers(pair, task.max_new_tokens), **decoders}
    relaxed = tuple(rule for rule in RULES if rule != "lossless")
    lossless = [name for name in ways if not name.startswith(relaxed)]
    speeds: dict[str, list[float]] = defaultdict(list)
    correct: dict[str, list[bool]] = defaultdict(list)
    forwards, num_different = Forwards(pair), 0
    for number, problem in enumerate(task.problems("test", num_problems + WARM_UP)):
        answers = {}
        names = list(ways)
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            started = time.perf_counter()
            answers[name] = ways[name](problem.prompt)
            seconds = time.perf_counter() - started
            if number >= WARM_UP:
                speeds[name].append(len(answers[name]) / seconds)
                text = pair.tokenizer.decode(answers[name], skip_special_tokens=True)
                correct[name].append(task.equivalent(task.extract_answer(text), problem.reference))
        if number >= WARM_UP:
            num_different += len({tuple(answers[name]) for name in lossless}) > 1
        forwards.measure()
        print(f"{number + 1} of {num_problems + WARM_UP} problems", file=sys.stderr, flush=True)
    best_peer = _fastest(speeds, [name for name in ways if "assisted" in name])
    best_k = {rule: _fastest(speeds, [f"{rule}, K = {k}" for k in KS]) for rule in RULES}
    rounds = {name: one.rounds() for name, one in decoders.items() if name != "target_only"}
    bounds = forwards.medians()
    for k in KS:
        rounds[f"lossless, K = {k}"]["round_over_bound"] = rounds[f"lossless, K = {k}"]["round_ms"] / bounds[f"K = {k}"]
    return {
        "num_problems": num_problems,
        "num_with_different_tokens": num_different,
        "over_plain": {name: ratio(speeds, name, "transformers plain") for name in ways},
        "over_target_only": {name: ratio(speeds, name, "target_only") for name in decoders},
        "solved": {name: sum(values) / len(values) for name, values in correct.items()},
        "best_peer": best_peer,
        "best_k": best_k,
        "auto over best K": {rule: ratio(speeds, f"{rule}, K = auto", best) for rule, best in best_k.items()},
        "lossless auto over best peer": ratio(speeds, "lossless, K = auto", best_peer),
        "target_only over transformers plain": ratio(speeds, "target_only", "transformers plain"),
        "rounds": rounds,
        "bound_ms": bounds,
    }


def _fastest(speeds: dict[str, list[float]], names: list[str]) -> str:
    """Return the name with the highest median speed."""
    return max(names, key=lambda name: statistics.median(speeds[name]))


def ratio(speeds: dict[str, list[float]], fast: str, slow: str) -> dict:
    """Return the ratio of tokens per second: median over problems, with a 95% interval."""
    ratios = np.array(speeds[fast]) / np.array(speeds[slow])
    interval = bootstrap_interval(lambda index: float(np.median(ratios[index])), len(ratios))
    return {"median": float(np.median(ratios)), "ci95": list(interval)}


def peak_memory(target: str, with_reprieve: bool) -> float:
    """Return the peak memory of answering twenty problems, in MiB above the loaded models."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak, (target, with_reprieve))


def _peak(target: str, with_reprieve: bool) -> float:
    pair = reprieve.load_pair(target, dtype="float32")
    torch.set_num_threads(1)
    task = task_of(pair)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    before = _memory("VmRSS")
    defaults = dict(num_assistant_tokens=20, assistant_confidence_threshold=0.4)
    decode = (
        Ours(pair, "lossless", "auto", task.max_new_tokens)
        if with_reprieve
        else transformers_decoder(pair, task.max_new_tokens, **defaults)
    )
    for problem in task.problems("test", 20):
        decode(problem.prompt)
    return _memory("VmHWM") - before


def _memory(field: str) -> float:
    """Return a memory field of this process's /proc status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def busy_neighbour(target: str, limit: int) -> dict:
    """Measure the seconds of `reprieve bench` with and without a process that keeps another core busy."""
    seconds: dict[str, list[float]] = {"quiet": [], "busy": []}
    for _ in range(2):
        for name, measured in seconds.items():
            neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if name == "busy" else None
            try:
                with tempfile.TemporaryDirectory() as folder:
                    command = ["bench", "--target", target, "--limit", str(limit), "--arm", "judge", "--out", folder]
                    started = time.perf_counter()
                    program = [sys.executable, "-c", "from reprieve.cli.main import run; run()"]
                    subprocess.run([*program, *command], check=True, capture_output=True)
                    measured.append(time.perf_counter() - started)
            finally:
                if neighbour is not None:
                    neighbour.kill()
    quiet, busy = (statistics.median(values) for values in seconds.values())
    return {"limit": limit, "quiet_s": quiet, "busy_s": busy, "ratio": busy / quiet}


def aims(document: dict) -> list[list[str]]:
    """Return the rows of aims and measured values."""

    def reached(name: str) -> str:
        return _shown(document[name])

    bounds = ", ".join(f"{document['rounds'][f'lossless, K = {k}']['round_over_bound']:.2f} at K = {k}" for k in KS)
    peaks = document["peak_mib"]
    busy = document["busy_neighbour"]["ratio"]
    return [
        [f"lossless `auto` over {document['best_peer']}", "1.5", reached("lossless auto over best peer")],
        *(
            [f"{rule} `auto` over target-only", aim, _shown(document["over_target_only"][f"{rule}, K = auto"])]
            for rule, aim in AIMS.items()
        ),
        *(
            [
                f"{rule} `auto` over its best constant, {name.split(', ')[1]}",
                "1.0",
                _shown(document["auto over best K"][rule]),
            ]
            for rule, name in document["best_k"].items()
        ),
        ["a round over K draft forwards and one of the target", "at most 1.2", bounds],
        ["target-only over transformers' `generate`", "1.0", reached("target_only over transformers plain")],
        ["`bench --limit 4` beside a busy core, over quiet", "at most 1.5", f"{busy:.2f}"],
        [
            "memory of answering 20 problems, MiB (transformers, reprieve)",
            "-",
            f"{peaks['transformers assisted']:.0f}, {peaks['reprieve']:.0f}",
        ],
    ]


def _shown(value: dict) -> str:
    return over([value["median"], *value["ci95"]], 2)


def parts_of(document: dict) -> dict[str, dict]:
    """The results as tables."""
    here = document["over_target_only"]
    speeds = [
        [name, _shown(than), _shown(here[name]) if name in here else "-"]
        for name, than in document["over_plain"].items()
    ]
    rounds = []
    for name, one in document["rounds"].items():
        part_ms = ", ".join(f"{one['round_ms_by_part'][key]:.2f}" for key in ("draft", "verify", "rule", "commit"))
        counts = (f"{one['tokens_per_round']:.2f}", f"{one['drafted_per_round']:.1f}", f"{one['accepted_share']:.0%}")
        rounds.append([name, *counts, f"{one['round_ms']:.1f}", part_ms])
    same = document["num_problems"] - document["num_with_different_tokens"]
    note = f"All lossless ways gave the same tokens on {same} of {document['num_problems']} problems."
    head = ["arm", "tokens per round", "drafted", "accepted", "round, ms", "of it drafting, verifying, rule, commit"]
    return {
        "speed": part(["decoded by", "over `generate`", "over target-only here"], speeds, note),
        "rounds": part(head, rounds),
        "aims": part(["what", "aim", "reached"], aims(document)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--limit", type=whole(1), default=60)
    parser.add_argument("--num-threads", type=whole(1), default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    pair = reprieve.load_pair(arguments.target, dtype="float32")
    document = measure(pair, arguments.limit)
    peaks = (peak_memory(arguments.target, with_reprieve) for with_reprieve in (False, True))
    document["peak_mib"] = dict(zip(("transformers assisted", "reprieve"), peaks, strict=True))
    document["busy_neighbour"] = busy_neighbour(arguments.target, 4)
    write_parts(arguments.out / "engine.json", parts_of(document), **document)


if __name__ == "__main__":
    run(main)
