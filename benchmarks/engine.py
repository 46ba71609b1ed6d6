"""The engine against transformers, on the bundled pair: `python benchmarks/engine.py --out runs/benchmark`.

Paired in one process: for every problem the four ways of decoding take turns in a rotating order, after a warm-up.
Ratios are medians over problems of the ratio on the same problem, with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import reprieve
from reprieve.engine import Pair
from reprieve.evaluation.runner import environment
from reprieve.files import replace_file
from reprieve.metrics import bootstrap_interval
from reprieve.models import CachedModel
from reprieve.tasks import load_task
from reprieve.types import PARTS


def forward_ms(model: CachedModel, num_new: int, *, repeats: int = 60) -> float:
    """Median milliseconds of one forward over `num_new` tokens after 128 cached ones."""
    times = []
    with torch.inference_mode():
        model.start([5] * 128)
        for _ in range(repeats):
            started = time.perf_counter()
            model.forward([7] * num_new)
            times.append(time.perf_counter() - started)
            model.keep(128)
    return 1000 * statistics.median(times)


def transformers_decoder(pair: Pair, num_draft_tokens: int | None, max_new_tokens: int):
    """`generate`, plain or with the draft as assistant at a constant K."""
    extra = {}
    if num_draft_tokens is not None:
        config = pair.draft.generation_config
        config.num_assistant_tokens = num_draft_tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        extra = {"assistant_model": pair.draft}

    def decode(prompt: str) -> list[int]:
        ids = pair.tokenizer(prompt, return_tensors="pt").input_ids.to(pair.target.device)
        with torch.inference_mode():
            output = pair.target.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, **extra)
        return output[0, ids.shape[1] :].tolist()

    return decode


def measure(num_problems: int, num_draft_tokens: int, pair: Pair) -> dict:
    """All four on the same problems at one K."""
    task = load_task("arithmetic")
    params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)
    ours = {
        name: pair.decoder("lossless" if k else name, num_draft_tokens=k or 1)
        for name, k in (("target_only", None), ("lossless", num_draft_tokens))
    }
    parts = dict.fromkeys(PARTS, 0.0)
    counts = {"rounds": 0, "drafted": 0, "tokens": 0}

    def lossless(prompt: str) -> list[int]:
        made = ours["lossless"].generate(prompt, params, timed=True)
        for part in parts:
            parts[part] += made.seconds_by_part.get(part, 0.0)
        counts["rounds"] += made.num_rounds
        counts["drafted"] += made.num_drafted
        counts["tokens"] += len(made.tokens)
        return made.token_ids

    decoders = {
        "transformers generate": transformers_decoder(pair, None, task.max_new_tokens),
        "transformers assisted": transformers_decoder(pair, num_draft_tokens, task.max_new_tokens),
        "reprieve target_only": lambda prompt: ours["target_only"].generate(prompt, params).token_ids,
        "reprieve lossless": lossless,
    }
    problems = task.problems("test", num_problems + 3)
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    names = list(decoders)
    num_different = 0
    for number, problem in enumerate(problems):
        answers = {}
        for name in [*names[number % 4 :], *names[: number % 4]]:
            started = time.perf_counter()
            answers[name] = decoders[name](problem.prompt)
            if number >= 3:  # the first three warm up
                seconds[name].append(time.perf_counter() - started)
        num_different += len({tuple(answer) for answer in answers.values()}) > 1
        if number == 2:
            parts.update(dict.fromkeys(parts, 0.0))
            counts.update(dict.fromkeys(counts, 0))
    draft_ms = forward_ms(pair.cached_draft(), 1)
    verify_ms = forward_ms(pair.cached_target(), num_draft_tokens + 1)
    round_ms = 1000 * (sum(parts.values()) - parts["prefill"]) / counts["rounds"]
    return {
        "num_draft_tokens": num_draft_tokens,
        "num_problems": num_problems,
        "num_with_different_tokens": num_different,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "target_only vs transformers generate": ratio(seconds, "transformers generate", "reprieve target_only"),
        "lossless vs transformers assisted": ratio(seconds, "transformers assisted", "reprieve lossless"),
        "lossless vs target_only": ratio(seconds, "reprieve target_only", "reprieve lossless"),
        "tokens_per_round": counts["tokens"] / counts["rounds"],
        "round_ms": round_ms,
        "round_ms_by_part": {part: 1000 * value / counts["rounds"] for part, value in parts.items()},
        "draft_forward_ms": draft_ms,
        "target_forward_ms": forward_ms(pair.cached_target(), 1),
        "verify_forward_ms": verify_ms,
        "bound_ms": num_draft_tokens * draft_ms + verify_ms,
        "round_over_bound": round_ms / (num_draft_tokens * draft_ms + verify_ms),
    }


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> dict:
    """How many times faster `fast` is: median over problems, with a 95% interval."""
    ratios = np.array(seconds[slow]) / np.array(seconds[fast])
    interval = bootstrap_interval(lambda index: float(np.median(ratios[index])), len(ratios))
    return {"median": float(np.median(ratios)), "ci95": list(interval)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--num-draft-tokens", default="4,8,16")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    pair = reprieve.load_pair(dtype="float32")
    runs = []
    for k in map(int, arguments.num_draft_tokens.split(",")):
        runs.append(measure(arguments.limit, k, pair))
        print(json.dumps(runs[-1], indent=2), flush=True)
    document = {**environment(), "runs": runs}
    replace_file(arguments.out / "engine.json", json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
