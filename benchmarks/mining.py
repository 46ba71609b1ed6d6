"""What AutoJudge's search costs and guarantees: `python benchmarks/mining.py --labels runs/labels-autojudge`.

Speed: seconds a problem beside a straightforward implementation that calls transformers' `generate` anew for every
swap, taking turns in batches of problems. Guarantee: over all mined problems, whether a draft that answers differently
leaves an important token, for the search and, with --naive, for the naive variant. Writes mining.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import numpy as np
import torch

import reprieve
from reprieve.evaluation.arms import Arm, build_decoder
from reprieve.evaluation.records import replace_file
from reprieve.evaluation.runner import environment
from reprieve.labelling.recipes import MiningConfig, build
from reprieve.labelling.records import ProblemLabels
from reprieve.labelling.store import LabelStore
from reprieve.labelling.summary import summarise
from reprieve.metrics import bootstrap_interval
from reprieve.models import Pair
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


def speed(num_batches: int, batch: int, in_flight: int) -> dict:
    """Seconds of both on the same problems, batch by batch in turns, and whether their labels agree."""
    config = MiningConfig(
        miner="autojudge",
        target="reprieve/arithmetic-pair",
        limit=num_batches * batch,
        num_in_flight=in_flight,
        options={"variant": "search"},
    )
    bench = build(config)
    pair, task = reprieve.load_pair(), load_task("arithmetic")
    ours, theirs, same = [], [], []
    for start in range(0, len(bench.problems), batch):
        problems = bench.problems[start : start + batch]
        began = time.perf_counter()
        mined = asyncio.run(_mine(bench.miner, problems))
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        plain = [straightforward(pair, task, problem) for problem in problems]
        theirs.append(time.perf_counter() - began)
        same += [
            [(m.position, m.draft_id, m.important) for m in one.mismatches] == other
            for one, other in zip(mined, plain, strict=True)
        ]
        print(
            f"batch {start // batch + 1}: {ours[-1] / batch:.2f} and {theirs[-1] / batch:.2f} s a problem", flush=True
        )
    fast, slow = np.array(ours), np.array(theirs)
    return {
        "num_problems": len(bench.problems),
        "in_flight": in_flight,
        "seconds_per_problem": fast.sum() / len(bench.problems),
        "seconds_per_problem_straightforward": slow.sum() / len(bench.problems),
        "ratio": slow.sum() / fast.sum(),
        "ratio_ci95": bootstrap_interval(lambda i: slow[i].sum() / fast[i].sum(), len(fast)),
        "num_problems_with_the_same_labels": sum(same),
    }


async def _mine(miner, problems: list[TaskProblem]) -> list[ProblemLabels]:
    return list(await asyncio.gather(*(miner.mine(problem) for problem in problems)))


def guarantee(stores: dict[str, list[ProblemLabels]]) -> dict:
    """Important tokens where the draft alone answers differently from the target."""
    pair, task = reprieve.load_pair(), load_task("arithmetic")
    decoder = build_decoder(Arm("draft_only", None, 1), pair)
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
    parser.add_argument("--labels", type=Path, default=Path("runs/labels-autojudge"))
    parser.add_argument("--naive", type=Path, default=None, help="a store mined with --variant naive")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/mining-report"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document = {**environment()}
    if arguments.batches:
        document["speed"] = speed(arguments.batches, arguments.batch, arguments.batch)
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
