"""What AutoJudge's search costs and guarantees: `python benchmarks/mining.py`.

Speed: seconds a problem beside a straightforward implementation that calls transformers' `generate` anew for every
swap, in turns. Guarantee: over all mined problems, whether a draft that answers differently
leaves an important token, for the search and, with --naive, for the naive variant. Writes mining.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import reprieve
from reprieve.engine import Pair
from reprieve.evaluation.runner import environment
from reprieve.files import replace_file
from reprieve.labelling.recipes import build
from reprieve.labelling.records import ProblemLabels
from reprieve.labelling.runner import mine_problems
from reprieve.labelling.settings import AutoJudgeMining
from reprieve.labelling.store import LabelStore
from reprieve.labelling.summary import summarise
from reprieve.metrics import bootstrap_interval
from reprieve.settings import PairSettings
from reprieve.tasks import Task, TaskProblem, load_task


@torch.inference_mode()
def straightforward(pair: Pair, task: Task, problem: TaskProblem) -> list[tuple[int, int, bool]]:
    """Algorithm 1 as one would first write it: no cache kept, one problem at a time."""

    def generate(ids: list[int], num_left: int) -> list[int]:
        if num_left < 1:
            return []
        given = torch.tensor([ids])
        made = pair.target.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=num_left, do_sample=False, pad_token_id=0
        )
        return made[0, len(ids) :].tolist()

    prompt = pair.tokenizer.encode(problem.prompt)
    running = generate(prompt, task.max_new_tokens)
    reference = task.extract_answer(pair.tokenizer.decode(running))
    found, place = [], 0
    while reference is not None:
        drafted = pair.draft(torch.tensor([[*prompt, *running]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        place = next((t for t in range(place, len(running)) if drafted[t] != running[t]), -1)
        if place < 0:
            break
        swapped = [*running[:place], drafted[place]]
        if drafted[place] != pair.tokenizer.eos_token_id:
            swapped += generate([*prompt, *swapped], task.max_new_tokens - len(swapped))
        important = not task.equivalent(task.extract_answer(pair.tokenizer.decode(swapped)), reference)
        found.append((place, drafted[place], important))
        if not important:
            running = swapped
        place += 1
    return found


def speed(num_turns: int, num_ours: int, num_plain: int, in_flight: int) -> dict:
    """Seconds a problem of both, in turns: ours over many problems, the plain way over the first few of the same."""
    models = PairSettings("reprieve/arithmetic-pair")
    bench = build(AutoJudgeMining(task="arithmetic", limit=num_turns * num_ours, num_in_flight=in_flight, pair=models))
    pair, task = reprieve.load_pair("reprieve/arithmetic-pair"), load_task("arithmetic")
    ours, theirs, same = [], [], []
    for start in range(0, len(bench.problems), num_ours):
        problems = bench.problems[start : start + num_ours]
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            store = LabelStore(Path(folder), bench.manifest)
            mine_problems(bench.miner, problems, store, num_in_flight=in_flight)
            mined = {labels.problem_id: labels for labels in store.problems()}
        ours.append((time.perf_counter() - began) / len(problems))
        for problem in problems[:num_plain]:
            began = time.perf_counter()
            plain = straightforward(pair, task, problem)
            theirs.append(time.perf_counter() - began)
            found = mined[problem.problem_id].mismatches
            same.append([(m.position, m.draft_id, bool(m.important)) for m in found] == plain)
        print(f"{start + len(problems)}: {ours[-1]:.2f} and {np.mean(theirs[-num_plain:]):.2f} s a problem", flush=True)
    slow = np.array(theirs)
    return {
        "num_problems": len(bench.problems),
        "num_problems_straightforward": len(slow),
        "in_flight": in_flight,
        "seconds_per_problem": float(np.mean(ours)),
        "seconds_per_problem_straightforward": float(slow.mean()),
        "ratio": float(slow.mean() / np.mean(ours)),
        "ratio_ci95": bootstrap_interval(lambda i: float(slow[i].mean() / np.mean(ours)), len(slow)),
        "num_problems_with_the_same_labels": sum(same),
    }


def guarantee(stores: dict[str, list[ProblemLabels]]) -> dict:
    """Important tokens where the draft alone answers differently from the target."""
    pair, task = reprieve.load_pair("reprieve/arithmetic-pair"), load_task("arithmetic")
    decoder = pair.decoder("draft_only")
    params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)
    every = {labels.problem_id: labels for problems in stores.values() for labels in problems}
    differs = set()
    for number, labels in enumerate(every.values()):
        answer = task.extract_answer(decoder.generate(list(labels.prompt_ids), params).text)
        if labels.target_answer is not None and not task.equivalent(answer, labels.target_answer):
            differs.add(labels.problem_id)
        if number % 100 == 0:
            print(f"{number} of {len(every)} answered by the draft", flush=True)
    document = {}
    for name, problems in stores.items():
        counts = {p.problem_id: sum(bool(m.important) for m in p.mismatches) for p in problems}
        mine = differs & counts.keys()
        summary = summarise(problems)
        document[name] = {
            "num_problems": summary.num_problems,
            "num_mismatches": summary.num_labelled,
            "num_important": summary.num_important,
            "share_important": summary.share_important,
            "draft_answers_differently": len(mine),
            "of_those_without_an_important_token": sum(counts[problem_id] == 0 for problem_id in mine),
        }
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=Path, default=Path("benchmarks/labels/autojudge"))
    parser.add_argument("--naive", type=Path, default=None, help="a store mined with --variant naive")
    parser.add_argument("--turns", type=int, default=3, help="0 leaves the timing out")
    parser.add_argument("--ours", type=int, default=64, help="problems a turn")
    parser.add_argument("--plain", type=int, default=8, help="of those, problems mined in the straightforward way too")
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/mining-report"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document = {**environment()}
    if arguments.turns:
        document["speed"] = speed(arguments.turns, arguments.ours, arguments.plain, arguments.in_flight)
    if arguments.labels.exists():
        stores = {"search": LabelStore(arguments.labels).problems()}
        if arguments.naive is not None:
            stores["naive"] = LabelStore(arguments.naive).problems()
            shared = {p.problem_id for p in stores["naive"]}
            stores["search, same problems"] = [p for p in stores["search"] if p.problem_id in shared]
        document["guarantee"] = guarantee(stores)
    replace_file(arguments.out / "mining.json", json.dumps(document, indent=2) + "\n")
    print(json.dumps({key: document[key] for key in ("speed", "guarantee") if key in document}, indent=1))


if __name__ == "__main__":
    main()
