"""Accuracy and speed of int8 weights on this CPU, compared with float32: `python benchmarks/int8.py --out runs/int8`.

Two tables. `accuracy`: divergence of next-token distributions on GSM8K's reference solutions, and how often the most
likely token is the same. `speed`: median time of a forward of 1 to 33 tokens after 200 cached ones; needs an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from arms import part, run, whole, write_parts
from reprieve.bench.results import Machine
from reprieve.engine import Pair, load_pair
from reprieve.models.cached_model import CachedModel

ROWS = (1, 3, 5, 9, 17, 33)
_CACHED, _REPEATS = 200, 9


def texts_of(path: Path, num: int) -> list[str]:
    """Return questions with their solutions."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:num]]
    return [f"{row['question']}\n{row['answer']}" for row in rows]


@torch.inference_mode()
def log_probs(model: Pair, texts: list[str]) -> torch.Tensor:  # [n, V]
    ids = [model.tokenizer.encode(text) for text in texts]
    return torch.cat([model.target(torch.tensor([one])).logits[0].log_softmax(-1).half() for one in ids])


@torch.inference_mode()
def milliseconds(model: CachedModel, num: int) -> float:
    ids = list(range(1000, 1000 + _CACHED + num))
    model.start(ids[:_CACHED], reuse_prefix=True)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        model.forward(ids[_CACHED:])
        times.append(1000 * (time.perf_counter() - started))
        model.truncate(_CACHED)
    return statistics.median(times)


def measure(name: str, texts: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return a row of accuracy, and a row of speed for each precision."""
    found: dict[str, torch.Tensor] = {}
    speeds = []
    for dtype in ("float32", "int8"):
        model = load_pair(name, dtype=dtype, device="cpu")
        found[dtype] = log_probs(model, texts)
        cached = model.cached_target()
        speeds.append([name, dtype, *(f"{milliseconds(cached, rows):.0f}" for rows in ROWS)])
        print(*speeds[-1], flush=True)
        del model, cached
    exact, rounded = (found[dtype].float() for dtype in ("float32", "int8"))
    divergence = (exact.exp() * (exact - rounded)).nan_to_num().sum(-1).clamp_min(0)
    same = (exact.argmax(-1) == rounded.argmax(-1)).float()
    row = [
        name,
        str(len(same)),
        f"{divergence.mean():.4f}",
        f"{divergence.quantile(0.99):.3f}",
        f"{100 * same.mean():.1f}",
    ]
    return row, speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["runs/real-pair/target", "runs/real-pair/draft"])
    parser.add_argument("--texts", type=Path, default=Path("runs/real-pair/data/gsm8k_test.jsonl"))
    parser.add_argument("--limit", type=whole(1), default=12, help="texts")
    parser.add_argument("--out", type=Path, default=Path("runs/int8"))
    options = parser.parse_args()
    texts = texts_of(options.texts, options.limit)
    rows, speeds = zip(*(measure(name, texts) for name in options.models), strict=True)
    accuracy = ["model", "tokens", "mean KL to float32, nats", "99% quantile", "same likeliest token, %"]
    speed = ["model", "precision", *(f"{num} tokens, ms" for num in ROWS)]
    machine = Machine.here()
    processor = f"{machine.num_threads} threads of an {machine.processor}"
    speeds_note = f"A forward behind {_CACHED} cached tokens; {processor}."
    parts = {
        "accuracy": part(accuracy, list(rows), f"{len(texts)} GSM8K test problems with their solutions."),
        "speed": part(speed, [row for model_rows in speeds for row in model_rows], speeds_note),
    }
    write_parts(options.out / "int8.json", parts)


if __name__ == "__main__":
    run(main)
