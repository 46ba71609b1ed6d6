"""Speed with a target that does not fit in memory: `python benchmarks/offload.py --limit 12`.

AutoJudge, appendix H: with weights fetched from disk for every forward (accelerate), a target pass costs far more than
a draft pass, so a large K pays off if enough tokens are accepted. Lossless and judge at K = 8 and K = 48 take turns on
every problem, in rotating order, after one warm-up answer each. Writes offload.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import disk_offload

import reprieve
from arms import over, part, run, task_of, whole, write_parts
from reprieve.bench.arms import Arm
from reprieve.heads.loading import attach_heads
from reprieve.stats import bootstrap_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", default="reprieve/miniature-judge")
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--limit", type=whole(1), default=40)
    parser.add_argument("--windows", type=whole(1), nargs="+", default=[8, 48], help="K")
    parser.add_argument("--out", type=Path, default=Path("runs/offload-report"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = reprieve.load_pair(arguments.target)
    print(f"pair {pair.identity.target_weights}", flush=True)  # compute fingerprints before weights are offloaded
    task = task_of(pair)
    judge = attach_heads(reprieve.parse_rule(f"judge:path={arguments.head}"))
    arms = [
        Arm(f"{name}, K = {k}", rule, k)
        for k in arguments.windows
        for name, rule in (("lossless", reprieve.parse_rule("lossless")), ("judge", judge))
    ]
    with tempfile.TemporaryDirectory() as folder:
        disk_offload(pair.target, folder, execution_device=torch.device("cpu"))
        decoders = {arm.label: arm.decoder(pair) for arm in arms}
        params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)
        totals: dict[str, list[tuple[float, ...]]] = {arm.label: [] for arm in arms}
        for decoder in decoders.values():
            decoder.generate(task.problems("train", 1)[0].prompt, params)
        for number, problem in enumerate(task.problems("test", arguments.limit)):
            order = [*decoders.items()]
            turn = number % len(order)
            for label, decoder in order[turn:] + order[:turn]:
                generation = decoder.generate(problem.prompt, params, timed=True)
                correct = task.equivalent(task.extract_answer(generation.text), problem.reference)
                parts = generation.seconds_by_part
                totals[label].append(
                    (
                        len(generation.tokens),
                        generation.seconds,
                        generation.num_rounds,
                        correct,
                        parts["draft"],
                        parts["verify"],
                    )
                )
            print(f"{number + 1} of {arguments.limit}", flush=True)
    rows = {label: np.array(values, dtype=float) for label, values in totals.items()}
    base = rows[arms[0].label]
    table = []
    for label, values in rows.items():
        tokens, _, rounds, correct, draft_s, verify_s = values.sum(0)
        faster = bootstrap_interval(lambda i, v=values: ratio(v[i], base[i]), len(values))
        times = (f"{1e3 * part_s / rounds:.0f}" for part_s in (draft_s, verify_s))
        table.append([label, int(correct), f"{tokens / rounds:.2f}", *times, over([ratio(values, base), *faster], 2)])
    costs = ("draft, ms per round", "verify, ms per round")
    head = ["arm", "solved", "tokens per round", *costs, f"speed over {arms[0].label}"]
    note = f"n = {arguments.limit} test problems, greedy; brackets are 95% intervals over problems."
    write_parts(arguments.out / "offload.json", {"offload": part(head, table, note)})


def ratio(values: np.ndarray, base: np.ndarray) -> float:
    """Return tokens per second over the baseline's."""
    return float((values[:, 0].sum() / values[:, 1].sum()) / (base[:, 0].sum() / base[:, 1].sum()))


if __name__ == "__main__":
    run(main)
