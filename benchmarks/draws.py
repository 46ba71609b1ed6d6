"""What drawing costs a token and row at a large vocabulary: all rows at once, and one row at a time as 0.2 did.

python benchmarks/draws.py --vocabulary 152000 --rows 16
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from reprieve.models.draws import GumbelNoise, UniformDraw, choose
from reprieve.models.sampling import Sampler
from reprieve.settings import SamplingParams

TEXT = list(range(300))  # tokens so far


def one_by_one_noise(scores: Tensor) -> list[int]:
    """Gumbel noise by a seeded generator on the host, a row at a time."""
    chosen: list[int] = []
    for row in scores:
        generator = torch.Generator().manual_seed(len(chosen))
        uniforms = torch.rand(len(row), generator=generator, dtype=torch.float64)
        chosen.append(int((row.double().cpu() - torch.log(-torch.log(uniforms.clamp_min(1e-300)))).argmax()))
    return chosen


def one_by_one_cdf(scores: Tensor) -> list[int]:
    """The inverse of the distribution function on the host, a row at a time."""
    chosen = []
    for row in scores.cpu():
        cumulative = row.softmax(-1).double().cumsum(-1)
        place = int(torch.searchsorted(cumulative, torch.rand((), dtype=torch.float64) * cumulative[-1], right=True))
        chosen.append(min(place, int((row > -torch.inf).nonzero()[-1])))
    return chosen


def milliseconds(work: Callable[[], object], repeats: int, num_rows: int) -> float:
    """The median time of it, by token and row."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times[1:]) / num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    logits = torch.randn(given.rows, given.vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    logits = logits.to(given.device)
    uniform = UniformDraw(lambda: 0.5)
    found = {}
    for name, params in {
        "temperature 1": SamplingParams(temperature=1.0),
        "temperature 0.6, top-p 0.95, top-k 20": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    }.items():
        scores = Sampler(params, logits.device).target_scores(logits)
        for kind, before, draws in (
            ("gumbel", one_by_one_noise, [GumbelNoise(row) for row in range(given.rows)]),
            ("uniform", one_by_one_cdf, [uniform] * given.rows),
        ):
            texts = [TEXT] * given.rows
            old = milliseconds(functools.partial(before, scores), given.repeats, given.rows)
            new = milliseconds(functools.partial(choose, scores, draws, texts), given.repeats, given.rows)
            found[f"{kind}, {name}"] = {"before_ms": old, "now_ms": new, "ratio": old / new}
    print(json.dumps(found, indent=2, default=str))


if __name__ == "__main__":
    main()
