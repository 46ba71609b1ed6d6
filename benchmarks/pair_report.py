"""Properties of a bundled pair: `python benchmarks/pair_report.py --task word_problems --target T --draft D`.

Measures the properties that `benchmarks/miniature.json` bounds: accuracies and their union, one-step problems, the
entropy of the target's wordings, its repair of a wrong result put into its answer, the effect of mismatches, the cost
of a forward, the size of the weights, and tokens per round of EAGLE-3's trees. Mismatches and labels are those of
AutoJudge's search; the better side of each, as in CoSpec's Table 3, follows from the answers of both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `recipes`

import reprieve
from arms import run, whole
from recipes.pair.wordings import SENTENCES
from reprieve.bench.results import Environment
from reprieve.bundles import bundle_of
from reprieve.concurrency import gather_all
from reprieve.engine import Pair
from reprieve.engine.continuations import ContinuationDecoder, Session
from reprieve.errors import ReprieveError
from reprieve.files import read_json, replace_file
from reprieve.mining.building import build
from reprieve.mining.runner import mine_problems
from reprieve.mining.settings import AutoJudgeMining
from reprieve.mining.store import LabelStore, ProblemLabels
from reprieve.mining.target import LocalTarget, ResponseFormat
from reprieve.models.cached_model import eos_token_ids, forward_seconds
from reprieve.models.stored import model_folder
from reprieve.settings import PairSettings
from reprieve.stats import wilson_interval
from reprieve.tasks import Task, TaskProblem, load_task
from reprieve.tasks.word_problems import ArithmeticTask, draw_problem
from tables import grid

PROPERTIES = Path(__file__).parent / "miniature.json"
RESULT = re.compile(r"=(\d+)")
_OPENERS = "|".join(word for place in ("first", "middle", "last") for word in SENTENCES[place])
_HEDGES = "|".join(SENTENCES["hedge"])
# Wordings of a step differ at its opener, at the hedge after the comma, and at the body after the hedge.
STEP = re.compile(rf"(?<= )({_OPENERS}), ({_HEDGES}) ")
NUM_ROWS = 16


class Writer:
    """Greedy, batched decoding of texts with one model."""

    def __init__(self, pair: Pair, role: str, task: Task) -> None:
        model = pair.target if role == "target" else pair.draft
        assert model is not None
        self.task = task
        self.format = ResponseFormat(
            pair.tokenizer, task, frozenset(eos_token_ids(pair.target, pair.tokenizer)), task.max_new_tokens
        )
        params = reprieve.SamplingParams()
        self.decoder = ContinuationDecoder(model, num_rows=NUM_ROWS, params=params, eos_ids=self.format.eos_ids)

    def write(self, problems: Sequence[TaskProblem], begun: Sequence[str] = ()) -> list[str]:
        """Return a solution of each problem that begins with its text in `begun`."""
        return asyncio.run(self._write(problems, begun or [""] * len(problems)))

    async def _write(self, problems: Sequence[TaskProblem], begun: Sequence[str]) -> list[str]:
        target = LocalTarget(self.decoder)
        return await gather_all(self._one(target, *one) for one in zip(problems, begun, strict=True))

    async def _one(self, target: LocalTarget, problem: TaskProblem, begun: str) -> str:
        prompt_ids = self.format.encode_prompt(problem)
        ids = self.format.tokenizer.encode(problem.prompt + begun)[len(prompt_ids) :]
        left = self.format.num_left(ids)
        new = await target.complete(Session(), prompt_ids, ids, left, None) if left > 0 else []
        return begun + self.format.tokenizer.decode(new, skip_special_tokens=True)

    def solved(self, problem: TaskProblem, text: str) -> bool:
        return self.task.equivalent(self.task.extract_answer(text), problem.reference)


def accuracies(writers: dict[str, Writer], task: Task, num_problems: int) -> tuple[dict, list[str]]:
    """Measure target, draft and their union on test and one-step problems; also return the target's test texts."""
    problems = task.problems("test", num_problems)
    assert isinstance(task, ArithmeticTask)
    drawn = (draw_problem("test", index, contents=task.contents) for index in range(8 * num_problems))
    easy = {problem.prompt for problem in drawn if len(problem.steps) == 1}
    one_step = [problem for problem in task.problems("test", 8 * num_problems) if problem.prompt in easy]
    found: dict = {}
    lines: list[str] = []
    for name, chosen in (("", problems), ("one_step_", one_step[:num_problems])):
        if not chosen:
            continue
        solved = {}
        for role, writer in writers.items():
            texts = writer.write(chosen)
            lines = lines or texts
            solved[role] = [writer.solved(*one) for one in zip(chosen, texts, strict=True)]
        solved["either"] = [a or b for a, b in zip(solved["target"], solved["draft"], strict=True)]
        for role, values in solved.items():
            share = {"share": sum(values) / len(values), "num": len(values)}
            found[f"{name}{role}"] = share | {"ci95": wilson_interval(sum(values), len(values))}
    return found, lines


@torch.inference_mode()
def wording_entropies(pair: Pair, problems: Sequence[TaskProblem], texts: Sequence[str]) -> list[float]:
    """Return the target's entropy, in nats, wherever its greedy answers could be worded differently."""
    found = []
    for problem, text in zip(problems, texts, strict=True):
        coded = pair.tokenizer(problem.prompt + text, return_offsets_mapping=True)
        offsets = [offset for match in STEP.finditer(text) for offset in (match.start(1), match.start(2), match.end())]
        # Tokens begin with their space.
        begins = {len(problem.prompt) + offset - 1 for offset in (1, *offsets)}
        log_probs = pair.target(torch.tensor([coded.input_ids])).logits[0].log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        rows = [row for row, (start, end) in enumerate(coded.offset_mapping) if start in begins and end > start]
        found += [float(entropies[row - 1]) for row in rows if row]
    return found


def repaired(writer: Writer, problems: Sequence[TaskProblem], texts: Sequence[str], *, seed: int = 0) -> list[bool]:
    """Return, for each answer, whether it is still right after one of its results is replaced by a wrong one."""
    rng = random.Random(seed)
    chosen, begun = [], []
    for problem, text in zip(problems, texts, strict=True):
        results = list(RESULT.finditer(text))
        if not results or not writer.solved(problem, text):
            continue
        result = rng.choice(results)
        wrong = str(int(result[1]) + rng.choice((-10, -1, 1, 10)))
        if not wrong.startswith("-"):
            chosen.append(problem)
            begun.append(text[: result.start(1)] + wrong)
    return [writer.solved(*one) for one in zip(chosen, writer.write(chosen, begun), strict=True)]


def mined(arguments: argparse.Namespace) -> list[tuple[TaskProblem, ProblemLabels]]:
    """Mine AutoJudge's labels of training problems; resumes."""
    pair = PairSettings(target=arguments.target, draft=arguments.draft, dtype="float32")
    bench = build(AutoJudgeMining(limit=arguments.mine, task=arguments.task, pair=pair))
    store = LabelStore(arguments.out / "labels", bench.manifest)
    report = mine_problems(bench.miner, bench.problems, store)
    if report.interrupted:
        raise KeyboardInterrupt
    if report.errors:
        raise ReprieveError(
            f"{len(report.errors)} problems failed, the first with {next(iter(report.errors.values()))}"
        )
    labels = {one.problem_id: one for one in store.problems()}
    return [(problem, labels[problem.problem_id]) for problem in bench.problems if problem.problem_id in labels]


@torch.inference_mode()
def mismatches(pair: Pair, task: Task, labelled: Sequence[tuple[TaskProblem, ProblemLabels]]) -> list[dict]:
    """Return each mismatch with the outcome of both sides and the draft token's rank and log-probability."""
    found = []
    for problem, labels in labelled:
        ids = torch.tensor([[*labels.prompt_ids, *labels.response_ids]])
        logits = pair.target(ids).logits[0, len(labels.prompt_ids) - 1 :]
        target_right = task.equivalent(labels.target_answer, problem.reference)
        for item in labels.labelled():
            row = logits[item.position]
            found.append(
                {
                    "problem_id": problem.problem_id,
                    "important": item.important,
                    "target_right": target_right,
                    "draft_right": task.equivalent(item.answer, problem.reference),
                    "draft_token": pair.tokenizer.decode([item.draft_id]),
                    "target_token": pair.tokenizer.decode([item.target_id]),
                    "log_prob": float(row.log_softmax(-1)[item.draft_id]),
                    "rank": int((row > row[item.draft_id]).sum()) + 1,
                }
            )
    return found


def auc(scores: list[float], labels: list[bool]) -> float:
    """Probability that an important mismatch scores above a harmless one; ties count half."""
    values, flags = torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)
    high, low = values[flags], values[~flags]
    wins = (high[:, None] > low[None]).double() + 0.5 * (high[:, None] == low[None]).double()
    return float(wins.mean())


def cost_ratio(pair: Pair, repeats: int = 200) -> float:
    """Return the time of a target forward in draft forwards, measured in turns."""
    models = (pair.cached_target(), pair.cached_draft())
    times = [[forward_seconds(model, 1) for model in models] for _ in range(repeats)]
    return statistics.median(target / draft for target, draft in times)


def tree_tokens(pair: Pair, task: Task, head: str, problems: list[TaskProblem]) -> float:
    """Return tokens per round of lossless decoding on EAGLE-3's trees at temperature 1."""
    decoder = pair.decoder("lossless", num_draft_tokens=6, drafter=f"eagle3:path={head},depth=6,total_tokens=32")
    generations = [
        decoder.generate(
            problem.prompt, reprieve.SamplingParams(max_new_tokens=task.max_new_tokens, temperature=1.0, seed=number)
        )
        for number, problem in enumerate(problems)
    ]
    return sum(len(one.tokens) for one in generations) / sum(one.num_rounds for one in generations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/pair-report"))
    parser.add_argument("--limit", type=whole(0), default=500, help="test problems")
    parser.add_argument("--mine", type=whole(0), default=100, help="training problems whose mismatches are labelled")
    parser.add_argument("--task", default="word_problems")
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--eagle", default=None, help="an EAGLE-3 head")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = reprieve.load_pair(arguments.target, arguments.draft, dtype="float32")
    task = load_task(arguments.task)
    values: dict[str, float] = {"cost_ratio": cost_ratio(pair)}
    document = {
        **asdict(Environment.here()),
        "target": arguments.target,
        "draft": arguments.draft,
        "task": arguments.task,
    }
    if arguments.limit:
        writers = {role: Writer(pair, role, task) for role in ("target", "draft")}
        solved, texts = accuracies(writers, task, arguments.limit)
        document["accuracy"] = solved
        for name, group in (("accuracy", ""), ("one_step", "one_step_")):
            for role in ("target", "draft"):
                if f"{group}{role}" in solved:
                    values[f"{name}_{role}"] = 100 * solved[f"{group}{role}"]["share"]
        values["union_gain"] = 100 * (solved["either"]["share"] - solved["target"]["share"])
        problems = task.problems("test", arguments.limit)
        entropies = wording_entropies(pair, problems, texts)
        if entropies:
            values["wording_entropy"] = statistics.median(entropies)
        repairs = repaired(writers["target"], problems, texts)
        values["repaired"] = 100 * sum(repairs) / max(1, len(repairs))
        document["num_repairs_tried"] = len(repairs)
    met = mismatches(pair, task, mined(arguments)) if arguments.mine else []
    if met:
        labels = [m["important"] for m in met]
        pairs = [(m["target_right"], m["draft_right"]) for m in met]
        values |= {
            "share_important": 100 * sum(labels) / len(labels),
            "auc_log_prob": auc([-m["log_prob"] for m in met], labels),
            "draft_better": 100 * pairs.count((False, True)) / len(pairs),
            "target_better": 100 * pairs.count((True, False)) / len(pairs),
            "both_wrong": 100 * pairs.count((False, False)) / len(pairs),
        }
        document["num_mismatches"] = len(met)
        document["auc_rank"] = auc([m["rank"] for m in met], labels)
    bundle = bundle_of(arguments.target)
    named = ((arguments.target, "target"), (arguments.draft, "draft"))
    folders = [bundle.folder] if bundle else [model_folder(name or arguments.target, role) for name, role in named]
    sizes = [path.stat().st_size for folder in folders for path in folder.rglob("model*.safetensors")]
    values["weights_mb"] = sum(sizes) / 1e6
    if arguments.eagle:
        values["eagle_tree_tokens"] = tree_tokens(pair, task, arguments.eagle, task.problems("test", 60))
    document["properties"] = values
    rows = []
    for expected in read_json(PROPERTIES, "the properties")["properties"]:
        low, high = expected["range"]
        value = values.get(expected["name"])
        verdict = "not measured" if value is None else "" if low <= value <= high else "**outside**"
        shown = "" if value is None else f"{value:.3g}"
        name, unit = expected["name"].replace("_", " "), expected["unit"]
        rows.append([f"{name}, {unit}", f"{shown} {verdict}".strip(), f"{low} to {high}", expected["source"]])
    counted = [f"{document['num_mismatches']} mismatches of {arguments.mine} training problems"] if met else []
    for name, found in document.get("accuracy", {}).items():
        low, high = (100 * end for end in found["ci95"])
        counted.append(
            f"{name.replace('_', ' ')} {100 * found['share']:.1f}% [{low:.1f}, {high:.1f}] of {found['num']}"
        )
    document["note"] = "; ".join(counted) + "."
    document |= {"head": ["property", "measured", "wanted", "source"], "rows": rows, "command": " ".join(sys.argv)}
    print(grid(document["head"], rows))
    replace_file(arguments.out / "pair.json", json.dumps(document, indent=2) + "\n")
    lines = "".join(json.dumps(m) + "\n" for m in met)
    replace_file(arguments.out / "mismatches.jsonl", lines)


if __name__ == "__main__":
    run(main)
