"""Speed of the engine, compared with transformers' decoding: `python benchmarks/engine.py --out runs/benchmark`.

All decoders run in one process and answer every problem, in rotating order, after a warm-up. Ratios are medians over
problems of the ratio on the same problem, with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import reprieve
from arms import over, part, run, task_of, whole, write_parts
from reprieve.engine import Pair
from reprieve.stats import bootstrap_interval
from reprieve.types import PARTS

KS = (8, 12, 16, 24)
RULES = {"lossless": "lossless", "judge": "judge", "margin": "margin:delta=2", "state arbiter": "state_arbiter"}
EAGLE = {"EAGLE-3 tree": "eagle3", "EAGLE-3 chain": "eagle3:top_k=1"}  # lossless, with the target's bundled head
WARM_UP = 3  # problems


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
    num_different = 0
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
        print(f"{number + 1} of {num_problems + WARM_UP} problems", file=sys.stderr, flush=True)
    rounds = {name: one.rounds() for name, one in decoders.items() if name != "target_only"}
    return {
        "num_problems": num_problems,
        "num_with_different_tokens": num_different,
        "over_plain": {name: ratio(speeds, name, "transformers plain") for name in ways},
        "over_target_only": {name: ratio(speeds, name, "target_only") for name in decoders},
        "solved": {name: sum(values) / len(values) for name, values in correct.items()},
        "rounds": rounds,
    }


def ratio(speeds: dict[str, list[float]], fast: str, slow: str) -> dict:
    """Return the ratio of tokens per second: median over problems, with a 95% interval."""
    ratios = np.array(speeds[fast]) / np.array(speeds[slow])
    interval = bootstrap_interval(lambda index: float(np.median(ratios[index])), len(ratios))
    return {"median": float(np.median(ratios)), "ci95": list(interval)}


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
    write_parts(arguments.out / "engine.json", parts_of(document), **document)


if __name__ == "__main__":
    run(main)
