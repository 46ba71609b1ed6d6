"""Cost and guarantee of AutoJudge's search: `python benchmarks/mining.py`.

Speed: seconds per problem, compared in turns with a straightforward implementation that calls transformers'
`generate` for every swap. Guarantee: whether the labels of every mined problem on which the draft alone answers
differently include an important token, for the search and, with --naive, for the naive variant. Writes mining.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import reprieve
from arms import labels_of, over, part, run, task_of, whole, write_parts
from reprieve.engine import Pair
from reprieve.mining.building import build
from reprieve.mining.runner import mine_problems
from reprieve.mining.settings import AutoJudgeMining
from reprieve.mining.show import summarise_labels
from reprieve.mining.store import LabelStore, ProblemLabels
from reprieve.settings import PairSettings
from reprieve.stats import bootstrap_interval, wilson_interval
from reprieve.tasks import Task, TaskProblem


@torch.inference_mode()
def straightforward(pair: Pair, task: Task, problem: TaskProblem) -> list[tuple[int, int, bool]]:
    """Implement Algorithm 1 directly: no cache between swaps, one problem at a time."""

    def generate(ids: list[int], num_left: int) -> list[int]:
        if num_left < 1:
            return []
        given = torch.tensor([ids])
        output = pair.target.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=num_left, do_sample=False, pad_token_id=0
        )
        return output[0, len(ids) :].tolist()

    prompt = pair.tokenizer.encode(problem.prompt)
    running = generate(prompt, task.max_new_tokens)
    reference = task.extract_answer(pair.tokenizer.decode(running))
    found, position = [], 0
    while reference is not None:
        drafted = pair.draft(torch.tensor([[*prompt, *running]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        position = next((t for t in range(position, len(running)) if drafted[t] != running[t]), -1)
        if position < 0:
            break
        swapped = [*running[:position], drafted[position]]
        if drafted[position] != pair.tokenizer.eos_token_id:
            swapped += generate([*prompt, *swapped], task.max_new_tokens - len(swapped))
        important = not task.equivalent(task.extract_answer(pair.tokenizer.decode(swapped)), reference)
        found.append((position, drafted[position], important))
        if not important:
            running = swapped
        position += 1
    return found


def speed(pair: Pair, task: Task, arguments: argparse.Namespace) -> dict:
    """Measure seconds per problem of both implementations in turns, the plain one on each turn's first problems.

    Ours has many problems in flight, so a turn's time is divided among them by the tokens generated for each.
    """
    num_ours, in_flight = arguments.ours, arguments.in_flight
    models = PairSettings(arguments.target)
    limit = arguments.turns * num_ours
    bench = build(AutoJudgeMining(task=task.name, limit=limit, num_in_flight=in_flight, pair=models))
    own_seconds, plain_seconds, same = [], [], []
    for start in range(0, len(bench.problems), num_ours):
        problems = bench.problems[start : start + num_ours]
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            store = LabelStore(Path(folder), bench.manifest)
            mine_problems(bench.miner, problems, store, num_in_flight=in_flight)
            mined = {labels.problem_id: labels for labels in store.problems()}
        seconds_per_token = (time.perf_counter() - began) / sum(labels.num_generated for labels in mined.values())
        for problem in problems[: arguments.plain]:
            began = time.perf_counter()
            plain = straightforward(pair, task, problem)
            plain_seconds.append(time.perf_counter() - began)
            own_seconds.append(seconds_per_token * mined[problem.problem_id].num_generated)
            found = mined[problem.problem_id].mismatches
            same.append([(m.position, m.draft_id, bool(m.important)) for m in found] == plain)
        means = [np.mean(times[-arguments.plain :]) for times in (own_seconds, plain_seconds)]
        print(f"{start + len(problems)} problems: {means[0]:.2f} and {means[1]:.2f} s per problem")
    fast, slow = np.array(own_seconds), np.array(plain_seconds)
    times = [slow.mean() / fast.mean(), *bootstrap_interval(lambda i: slow[i].mean() / fast[i].mean(), len(slow))]
    return part(
        ["what", "measured"],
        [
            ["seconds a problem, one `generate` for every swap", f"{slow.mean():.1f}"],
            [f"seconds a problem, {in_flight} in flight", f"{fast.mean():.2f}"],
            ["times as fast", over(times, 1)],
            ["the same labels", f"{sum(same)} of {len(same)} problems"],
        ],
        f"{len(slow)} problems both ways, in turns of {num_ours}; those in flight share a turn's time by their tokens.",
    )


def guarantee(pair: Pair, task: Task, stores: dict[str, LabelStore]) -> dict:
    """Count important tokens, and problems without one although the draft alone answers differently.

    The second count is for labels of greedy answers only: sampled labels come from other answers of both models.
    """
    decoder = pair.decoder("draft_only")
    params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)
    mined = {name: store.problems() for name, store in stores.items()}
    greedy = {name for name, store in stores.items() if not store.manifest["temperature"]}
    prompts = {labels.problem_id: labels.prompt_ids for name in greedy for labels in mined[name]}
    answers = {}
    for problem_id, prompt_ids in prompts.items():
        answers[problem_id] = task.extract_answer(decoder.generate(list(prompt_ids), params).text)
        if len(answers) % 100 == 0:
            print(f"{len(answers)} of {len(prompts)} answered by the draft", flush=True)
    rows = []
    for name, problems in mined.items():
        summary = summarise_labels(problems)
        important, labelled = summary.num_important, summary.num_labelled
        share = over([important / labelled, *wilson_interval(important, labelled)], 1, 100)
        counts = [summary.num_problems, labelled, important]
        rows.append([name, *counts, share, *(_misses(task, problems, answers) if name in greedy else ["-", "-"])])
    head = [
        "labels",
        "problems",
        "mismatches",
        "important",
        "share, %",
        "draft's own answer differs",
        "of those, none important",
    ]
    return part(head, rows, "brackets are 95% intervals that treat tokens as independent.")


def _misses(task: Task, problems: list[ProblemLabels], answers: dict[str, str | None]) -> list[int]:
    """Count the problems on which draft and target answer differently, and those of them without an important token."""
    differing = [
        labels
        for labels in problems
        if labels.target_answer is not None and not task.equivalent(answers[labels.problem_id], labels.target_answer)
    ]
    return [len(differing), sum(not any(m.important for m in labels.mismatches) for labels in differing)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--labels", type=Path, default=Path("benchmarks/labels/miniature-autojudge"))
    parser.add_argument("--pivot-labels", type=Path, default=Path("benchmarks/labels/miniature-pivot"))
    parser.add_argument("--naive", type=Path, default=None, help="a store mined with --variant naive")
    parser.add_argument("--turns", type=whole(0), default=3, help="turns of the timing; 0 skips it")
    parser.add_argument("--ours", type=whole(1), default=64, help="problems per turn")
    parser.add_argument(
        "--plain", type=whole(1), default=8, help="of those, problems that the plain implementation mines too"
    )
    parser.add_argument("--in-flight", type=whole(1), default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/mining-report"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = reprieve.load_pair(arguments.target)
    task = task_of(pair)
    stores = {"AutoJudge, the search": labels_of(pair, arguments.labels)}
    if arguments.naive is not None:
        stores["AutoJudge, naive"] = labels_of(pair, arguments.naive)
    stores["PAD"] = labels_of(pair, arguments.pivot_labels)
    parts = {"labels": guarantee(pair, task, stores)}
    if arguments.turns:
        parts["speed"] = speed(pair, task, arguments)
    write_parts(arguments.out / "mining.json", parts)


if __name__ == "__main__":
    run(main)
