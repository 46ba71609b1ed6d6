"""What the plugin brings and costs inside vLLM, on the bundled pair (needs vLLM; see docs/guides/serving.md).

Each arm is an engine in a process of its own; they take turns, so that each ratio is the median over neighbouring runs:

- `unpatched`: vLLM without the plugin (VLLM_PLUGINS empty); `standard`: the plugin installed and not configured;
- one arm a rule;
- `synthetic ...`: vLLM's own synthetic acceptance at that rule's accepted length: what the rule could reach if judging
  cost nothing. The CPU build has no kernel for it; `synthetic_kernel` is one.

Throughput is measured at a fixed answer length (end-of-text ignored), accuracy on answers that end by themselves.
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

RULES = [
    "margin:delta=2",
    "judge:path=reprieve/arithmetic-judge,threshold=0.04",
    "judge:path=reprieve/arithmetic-judge,threshold=0.15",
]
FIXED = 96


def synthetic_kernel(output, ends, drafted, argmax, bonus, is_greedy, max_spec_len, uniforms, rates, *rest):
    """vLLM's greedy synthetic acceptance, in Python: a draft passes where its draw is below its place's rate."""
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


def engine(arm, k, batch, pipe):
    """A child: an engine of `batch` slots that answers jobs (prompts, fixed length or not) with what they took."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_PLUGINS="" if arm["kind"] == "unpatched" else "reprieve")
    from vllm import LLM, SamplingParams

    from reprieve.bundles import ARITHMETIC

    spec = {"method": "draft_model", "model": str(ARITHMETIC.role_folder("draft")), "num_speculative_tokens": k}
    if arm["kind"] == "synthetic":
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": arm["length"]}
    llm = LLM(
        model=str(ARITHMETIC.role_folder("target")),
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
        made = llm.generate(prompts, params, use_tqdm=False)
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
                "num_tokens": sum(len(output.outputs[0].token_ids) for output in made),
                "length": 1 + accepted / max(1, rounds),
                "token_ids": [list(output.outputs[0].token_ids) for output in made],
                "texts": [output.outputs[0].text for output in made],
            }
        )


def own_clock(llm):
    """Adds up the time between vLLM's call of its rejection sampler and the sampler's own work, and our bookkeeping."""
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

    ours = module.rejection_sample  # functools.partial(our wrapper, vLLM's function)
    module.rejection_sample = timed(functools.partial(ours.func, timed(ours.args[0], -1)), 1)
    rules = runner.reprieve.rules
    for name in ("take_counts", "note_drafts", "forget_all_but"):
        setattr(rules, name, timed(getattr(rules, name), 1))
    return clock


def _counters(llm):
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


class Arm:
    """The parent's side of a child."""

    def __init__(self, label, arm, k, batch):
        self.label = label
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine, args=(arm, k, batch, theirs), daemon=True
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
    """Tokens a second of each arm, run after run; the first round warms up."""
    speeds = {arm.label: [] for arm in arms}
    last = {}
    for repeat in range(repeats + 1):
        for arm in arms:
            last[arm.label] = made = arm.run(prompts, True)
            if repeat:
                speeds[arm.label].append(made["num_tokens"] / made["seconds"])
    return speeds, last


def ratio(speeds, arm, base):
    """Median of paired ratios, and their range without the extremes."""
    pairs = sorted(ours / theirs for ours, theirs in zip(speeds[arm], speeds[base], strict=True))
    inner = pairs[1:-1] if len(pairs) > 4 else pairs
    return {"median": statistics.median(pairs), "low": inner[0], "high": inner[-1], "n": len(pairs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="*", default=RULES)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16, help="for throughput")
    parser.add_argument("--problems", type=int, default=200, help="for accuracy")
    parser.add_argument(
        "--identical", type=int, default=100, help="prompts on which the plugin, off, must be unnoticed"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs/vllm-serving"))
    options = parser.parse_args()

    from reprieve.evaluation.runner import environment
    from reprieve.files import replace_file
    from reprieve.tasks import load_task

    task = load_task("arithmetic")
    problems = task.problems("test", max(options.problems, options.identical, 2 * max(options.batches)))
    prompts = [problem.prompt for problem in problems]
    report = {"schema": 1, **environment(), "options": {name: str(value) for name, value in vars(options).items()}}
    report |= {"accuracy": {}, "throughput": {}}
    for batch in sorted(options.batches, reverse=True):
        made = {kind: Arm(kind, {"kind": kind}, options.num_draft_tokens, batch) for kind in ("unpatched", "standard")}
        for rule in options.rules:
            made[rule] = Arm(rule, {"kind": "rule", "rule": rule}, options.num_draft_tokens, batch)
        if not report["accuracy"]:
            report["off"] = unnoticed(made, prompts[: options.identical])
            report["accuracy"] = accuracy(made, task, problems[: options.problems])
        report["throughput"][batch] = throughput(made, options, prompts[: max(options.prompts, 2 * batch)], batch)
        print(json.dumps({"batch": batch, **report["throughput"][batch]}, indent=1), flush=True)
        for arm in made.values():
            arm.close()
        replace_file(options.out / "results.json", json.dumps(report, indent=2) + "\n")


def unnoticed(arms, prompts):
    """On how many prompts the plugin, off, changes no token."""
    ours, theirs = (arms[kind].run(prompts, False)["token_ids"] for kind in ("standard", "unpatched"))
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"plugin off: the same tokens on {same} of {len(prompts)} prompts", flush=True)
    return {"same_tokens": same, "prompts": len(prompts)}


def accuracy(arms, task, problems):
    """Problems solved, and accepted length, by arm."""
    found = {}
    for label, arm in arms.items():
        made = arm.run([problem.prompt for problem in problems], False)
        solved = [
            task.equivalent(task.extract_answer(text), problem.reference)
            for text, problem in zip(made["texts"], problems, strict=True)
        ]
        found[label] = {"solved": solved, "num_solved": sum(solved), "n": len(solved), "length": made["length"]}
        print(f"{label}: {sum(solved)} of {len(solved)}, accepted length {made['length']:.2f}", flush=True)
    return found


def throughput(arms, options, prompts, batch):
    """Tokens a second of each arm and of its synthetic twin, and their ratios."""
    everyone = dict(arms)
    for rule in options.rules:
        length = arms[rule].run(prompts, True)["length"]
        twin = {"kind": "synthetic", "length": length}
        everyone[f"synthetic {rule}"] = Arm(f"synthetic {rule}", twin, options.num_draft_tokens, batch)
    speeds, last = take_turns(list(everyone.values()), prompts, options.repeats)
    rows = {
        label: {
            "tokens_per_second": statistics.median(speeds[label]),
            "length": last[label]["length"],
            "plugin_share": last[label]["plugin_share"],
            "over_standard": ratio(speeds, label, "standard"),
        }
        for label in everyone
    }
    rows["standard"]["over_unpatched"] = ratio(speeds, "standard", "unpatched")
    for rule in options.rules:
        rows[rule]["over_synthetic"] = ratio(speeds, rule, f"synthetic {rule}")
        everyone[f"synthetic {rule}"].close()
    return rows


if __name__ == "__main__":
    main()
