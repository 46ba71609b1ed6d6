"""Benefit and cost of the plugin inside vLLM, on a bundled pair (needs vLLM; see docs/guides/vllm_operations.md).

Each arm is an engine in its own process; arms take turns, and each ratio is the median over neighbouring runs:

- `unpatched`: vLLM without the plugin (VLLM_PLUGINS empty); `standard`: the plugin installed and not configured;
- one arm per rule;
- `synthetic ...`: vLLM's own synthetic acceptance at the accepted length of a rule, or of vLLM without one (`synthetic
  standard`). It skips the comparison with the target and accepts equally in every request, so that requests end
  together: a rule's bound is its twin's speed over that of `synthetic standard`. The CPU build has no kernel for it;
  `synthetic_kernel` is one.

Throughput is measured at a fixed answer length (end-of-text ignored), accuracy on answers that end by themselves.
Writes results.json, which `tables.py` renders.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

from arms import bundled, over, part, run, whole, write_parts
from reprieve.stats import wilson_interval
from reprieve.tasks import load_task

RULES = ["judge:path=reprieve/miniature-judge,threshold=0.1", "margin:delta=2"]
FIXED = 96


def synthetic_kernel(output, ends, drafted, argmax, bonus, is_greedy, max_spec_len, uniforms, rates, *rest):
    """vLLM's greedy synthetic acceptance, in Python: accepts a token if its draw is below its position's rate."""
    drafted_ids, own, draws, chances = drafted.tolist(), argmax.tolist(), uniforms.tolist(), rates.tolist()
    rows, start = [], 0
    for row, end in enumerate(ends.tolist()):
        kept = 0
        while start + kept < end and draws[start + kept] < chances[kept] and drafted_ids[start + kept] >= 0:
            kept += 1
        last = int(bonus[row]) if start + kept == end else own[start + kept]
        tokens = [*drafted_ids[start : start + kept], last]
        rows.append(tokens + [-1] * (max_spec_len + 1 - len(tokens)))
        start = end
    output.copy_(output.new_tensor(rows))


def engine(bundle, arm, k, batch, pipe):
    """Child process: run an engine of `batch` slots and answer jobs (prompts, fixed length or not) with their cost."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_PLUGINS="" if arm["kind"] == "unpatched" else "reprieve")
    from vllm import LLM, SamplingParams

    spec = {"method": "draft_model", "model": str(bundle.role_folder("draft")), "num_speculative_tokens": k}
    if arm["kind"] == "synthetic":
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": arm["length"]}
    llm = LLM(
        model=str(bundle.role_folder("target")),
        speculative_config=spec,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=batch,
        disable_log_stats=False,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        additional_config={"reprieve": arm["rule"]} if arm["kind"] == "rule" else {},
    )
    if arm["kind"] == "synthetic":
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({"vllm.v1.sample.rejection_sampler.rejection_greedy_sample_kernel": synthetic_kernel})
    clock = own_clock(llm) if arm["kind"] == "rule" else {"seconds": 0.0}
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        prompts, fixed = job
        params = SamplingParams(temperature=0, max_tokens=FIXED if fixed else 240, ignore_eos=fixed)
        clock["seconds"] = 0.0
        before, started = _counters(llm), time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        after = _counters(llm)
        accepted, rounds = (
            after[name] - before[name]
            for name in ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts")
        )
        pipe.send(
            {
                "seconds": seconds,
                "plugin_share": clock["seconds"] / seconds,
                "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
                "length": 1 + accepted / max(1, rounds),
                "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
                "texts": [output.outputs[0].text for output in outputs],
            }
        )


def own_clock(llm):
    """Add up the plugin's time: its sampler wrapper, without vLLM's sampler inside, and its bookkeeping."""
    from vllm.v1.sample import rejection_sampler as module

    clock = {"seconds": 0.0}
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def timed(function, sign):
        def wrapped(*args, **kwargs):
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                clock["seconds"] += sign * (time.perf_counter() - started)

        return wrapped

    wrapper = module.rejection_sample  # functools.partial(our wrapper, vLLM's function)
    module.rejection_sample = timed(functools.partial(wrapper.func, timed(wrapper.args[0], -1)), 1)
    rules = runner.reprieve.rules
    for owner, name in ((rules.counter, "take"), (rules, "note_drafts"), (rules, "forget_all_but")):
        setattr(owner, name, timed(getattr(owner, name), 1))
    return clock


def _counters(llm):
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


class Arm:
    """Parent's handle of a child process."""

    def __init__(self, options, label, arm, batch):
        self.label = label
        self.pipe, worker_end = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine, args=(options.target, arm, options.num_draft_tokens, batch, worker_end), daemon=True
        )
        self.process.start()
        assert self.pipe.recv() == "ready"

    def run(self, *job):
        self.pipe.send(job)
        return self.pipe.recv()

    def close(self):
        self.pipe.send(None)
        self.process.join(30)


def take_turns(arms, prompts, repeats):
    """Return tokens per second of each arm in every turn after a warm-up, and each arm's last outcome."""
    speeds = {arm.label: [] for arm in arms}
    last = {}
    for repeat in range(repeats + 1):
        for arm in arms:
            last[arm.label] = outcome = arm.run(prompts, True)
            if repeat:
                speeds[arm.label].append(outcome["num_tokens"] / outcome["seconds"])
    return speeds, last


def ratio(speeds, arm, base):
    """Median of paired ratios, and their range without the extremes: (median, low, high)."""
    pairs = sorted(speed / base_speed for speed, base_speed in zip(speeds[arm], speeds[base], strict=True))
    inner = pairs[1:-1] if len(pairs) > 4 else pairs
    return statistics.median(pairs), inner[0], inner[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=bundled, default="reprieve/miniature", help="name of a bundled pair")
    parser.add_argument("--rules", nargs="*", default=RULES)
    parser.add_argument("--num-draft-tokens", type=whole(1), default=8)
    parser.add_argument("--batches", type=whole(1), nargs="*", default=[1, 4, 16])
    parser.add_argument("--prompts", type=whole(1), default=16, help="number of prompts for throughput")
    parser.add_argument("--problems", type=whole(1), default=200, help="number of problems for accuracy")
    parser.add_argument(
        "--identical", type=whole(1), default=100, help="prompts to compare with and without the idle plugin"
    )
    parser.add_argument("--repeats", type=whole(1), default=7)
    parser.add_argument("--out", type=Path, default=Path("runs/vllm-serving"))
    options = parser.parse_args()

    task = load_task(options.target.task)
    problems = task.problems("test", max(options.problems, options.identical, 2 * max(options.batches)))
    prompts = [problem.prompt for problem in problems]
    found = {}
    for batch in sorted(options.batches, reverse=True):
        arms = {kind: Arm(options, kind, {"kind": kind}, batch) for kind in ("unpatched", "standard")}
        for rule in options.rules:
            arms[rule] = Arm(options, rule, {"kind": "rule", "rule": rule}, batch)
        if not found:
            same = num_unchanged(arms, prompts[: options.identical])
            solved = accuracy(arms, task, problems[: options.problems])
        found[batch] = throughput(arms, options, prompts[: max(options.prompts, 2 * batch)], batch)
        print(json.dumps({"batch": batch, **found[batch]}, indent=1), flush=True)
        for arm in arms.values():
            arm.close()
    batches = sorted(options.batches)
    note = (
        f"Tokens per second over vLLM without a rule, medians of {options.repeats} turns and their range without the "
        f"extremes; K = {options.num_draft_tokens}, answers of {FIXED} tokens. Installed without a rule, the plugin "
        f"gave the same tokens on {same} of {options.identical} prompts."
    )
    parts = {
        "throughput": part(
            ["arm", *(f"{batch} at once" for batch in batches), "tokens per round", "share of the plugin in the time"],
            [throughput_row(label, [found[batch][label] for batch in batches]) for label in found[batches[0]]],
            note,
        ),
        "accuracy": part(
            ["arm", "solved, %", "tokens per round"],
            solved,
            f"{options.problems} test problems, answers that end by themselves; brackets are 95% intervals.",
        ),
    }
    write_parts(options.out / "results.json", parts)


def throughput_row(label, cells):
    """Return an arm's row of the table: its values at each batch size."""
    ratios = ["1" if label == "standard" else over(cell["over_standard"], 2) for cell in cells]
    lengths, shares = ([cell[name] for cell in cells] for name in ("length", "plugin_share"))
    share = f"{100 * min(shares):.1f} to {100 * max(shares):.1f}%" if max(shares) else "-"
    return [f"`{label}`", *ratios, f"{min(lengths):.2f} to {max(lengths):.2f}", share]


def num_unchanged(arms, prompts):
    """Return the number of prompts on which the plugin without a rule changes no token."""
    with_plugin, without_plugin = (arms[kind].run(prompts, False)["token_ids"] for kind in ("standard", "unpatched"))
    same = sum(a == b for a, b in zip(with_plugin, without_plugin, strict=True))
    print(f"plugin off: the same tokens on {same} of {len(prompts)} prompts", flush=True)
    return same


def accuracy(arms, task, problems):
    """Return a row of the table for each arm: problems solved, tokens per round."""
    rows = []
    for label, arm in arms.items():
        outcome = arm.run([problem.prompt for problem in problems], False)
        num_solved = sum(
            task.equivalent(task.extract_answer(text), problem.reference)
            for text, problem in zip(outcome["texts"], problems, strict=True)
        )
        share = over([num_solved / len(problems), *wilson_interval(num_solved, len(problems))], 1, 100)
        rows.append([f"`{label}`", share, f"{outcome['length']:.2f}"])
        print(rows[-1], flush=True)
    return rows


def throughput(arms, options, prompts, batch):
    """Measure the arms and their synthetic twins, relative to vLLM without a rule."""
    all_arms = dict(arms)
    twins = ("standard", *options.rules)
    for rule in twins:
        length = arms[rule].run(prompts, True)["length"]
        twin = {"kind": "synthetic", "length": length}
        all_arms[f"synthetic {rule}"] = Arm(options, f"synthetic {rule}", twin, batch)
    speeds, last = take_turns(list(all_arms.values()), prompts, options.repeats)
    rows = {
        label: {
            "tokens_per_second": statistics.median(speeds[label]),
            "length": last[label]["length"],
            "plugin_share": last[label]["plugin_share"],
            "over_standard": ratio(speeds, label, "standard"),
        }
        for label in all_arms
    }
    for rule in twins:
        all_arms[f"synthetic {rule}"].close()
    return rows


if __name__ == "__main__":
    run(main)
