"""Is a bundled pair a fair miniature? `python benchmarks/pair_report.py --task word_problems --target T --draft D`.

Measures what `benchmarks/miniature.json` fixes: accuracies and their union, one-step problems, how the target spreads
over wordings, whether it repairs a wrong result put into its answer, what mismatches are worth, the cost of a forward,
weights, and the tokens a round of EAGLE-3's trees. Mismatches are labelled by AutoJudge's Algorithm 1 in its plainest
form: replace, regenerate with the target, compare answers; which side is better, as CoSpec's Table 3 counts it, is seen
from the same two answers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from pathlib import Path

import torch

import reprieve
from reprieve.engine import Pair
from reprieve.evaluation.runner import environment
from reprieve.files import read_json, replace_file
from reprieve.heads.files import bundled_folder
from reprieve.metrics import wilson_interval
from reprieve.models.timing import forward_seconds
from reprieve.pair.problems import draw_problem
from reprieve.tasks import Task, TaskProblem, load_task
from reprieve.tasks.arithmetic import ArithmeticTask

PROPERTIES = Path(__file__).parent / "miniature.json"
RESULT = re.compile(r"=(\d+)")
# Where a solution may be worded otherwise: its beginning, and after each sentence and opener.
PLACES = re.compile(r"^|\.|\b(?:First|Then|Next|Now|Finally|Lastly|Initially|At last),")


def solved_by(pair: Pair, rule: str, task: Task, problems: list[TaskProblem]) -> list[bool]:
    """Whether each problem is solved, greedily."""
    decoder = pair.decoder(rule)
    params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)
    made = (decoder.generate(problem.prompt, params) for problem in problems)
    return [
        task.equivalent(task.extract_answer(one.text), problem.reference)
        for one, problem in zip(made, problems, strict=True)
    ]


def accuracies(pair: Pair, task: Task, num_problems: int) -> dict:
    """Target, draft and the oracle union on the test split, and on its one-step problems."""
    problems = task.problems("test", num_problems)
    assert isinstance(task, ArithmeticTask)
    drawn = (draw_problem("test", index, contents=task.contents) for index in range(8 * num_problems))
    easy = {problem.prompt for problem in drawn if len(problem.steps) == 1}
    one_step = [problem for problem in task.problems("test", 8 * num_problems) if problem.prompt in easy]
    found = {}
    for name, chosen in (("", problems), ("one_step_", one_step[:num_problems])):
        if not chosen:
            continue
        solved = {role: solved_by(pair, f"{role}_only", task, chosen) for role in ("target", "draft")}
        solved["either"] = [a or b for a, b in zip(solved["target"], solved["draft"], strict=True)]
        for role, values in solved.items():
            share = {"share": sum(values) / len(values), "num": len(values)}
            found[f"{name}{role}"] = share | {"ci95": wilson_interval(sum(values), len(values))}
    return found


@torch.inference_mode()
def walk(pair: Pair, task: Task, problems: list[TaskProblem]) -> list[dict]:
    """Mismatches of greedy answers: what both sides come to, and rank and log-probability under the target."""
    decoder = pair.decoder("target_only")
    found = []
    for problem in problems:
        prompt_ids = pair.tokenizer.encode(problem.prompt)
        answer_ids = _continue(decoder, prompt_ids, task.max_new_tokens)
        reference = task.extract_answer(pair.tokenizer.decode(answer_ids))
        place = 0
        while True:
            ids = torch.tensor([[*prompt_ids, *answer_ids]])
            drafted = pair.draft(ids).logits[0, len(prompt_ids) - 1 : -1].argmax(-1).tolist()
            place = next((t for t in range(place, len(answer_ids)) if drafted[t] != answer_ids[t]), -1)
            if place < 0:
                break
            logits = pair.target(ids).logits[0, len(prompt_ids) - 1 + place]
            swapped = [*answer_ids[:place], drafted[place]]
            if drafted[place] != pair.tokenizer.eos_token_id:
                swapped += _continue(decoder, [*prompt_ids, *swapped], task.max_new_tokens - len(swapped))
            answers = [task.extract_answer(pair.tokenizer.decode(one)) for one in (answer_ids, swapped)]
            important = not task.equivalent(answers[1], reference)
            right = [task.equivalent(answer, problem.reference) for answer in answers]
            found.append(
                {
                    "problem_id": problem.problem_id,
                    "important": important,
                    "target_right": right[0],
                    "draft_right": right[1],
                    "draft_token": pair.tokenizer.decode([drafted[place]]),
                    "target_token": pair.tokenizer.decode([answer_ids[place]]),
                    "log_prob": float(logits.log_softmax(-1)[drafted[place]]),
                    "rank": int((logits > logits[drafted[place]]).sum()) + 1,
                }
            )
            if not important:
                answer_ids = swapped
            place += 1
    return found


@torch.inference_mode()
def wording_entropies(pair: Pair, task: Task, problems: list[TaskProblem]) -> list[float]:
    """Nats of the target's distribution wherever its own greedy answers could be worded otherwise."""
    decoder, found = pair.decoder("target_only"), []
    for problem in problems:
        text = decoder.generate(problem.prompt, reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)).text
        coded = pair.tokenizer(problem.prompt + text, return_offsets_mapping=True)
        begins = {len(problem.prompt) + match.end() for match in PLACES.finditer(text)}
        log_probs = pair.target(torch.tensor([coded.input_ids])).logits[0].log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        rows = [row for row, (start, end) in enumerate(coded.offset_mapping) if start in begins and end > start and row]
        found += [float(entropies[row - 1]) for row in rows]
    return found


def repaired(pair: Pair, task: Task, problems: list[TaskProblem], *, seed: int = 0) -> list[bool]:
    """Whether the target's answer comes out right after one of its results was made wrong."""
    decoder, rng, found = pair.decoder("target_only"), random.Random(seed), []
    for problem in problems:
        made = decoder.generate(problem.prompt, reprieve.SamplingParams(max_new_tokens=task.max_new_tokens))
        results = list(RESULT.finditer(made.text))
        if not results or not task.equivalent(task.extract_answer(made.text), problem.reference):
            continue
        chosen = rng.choice(results)
        wrong = str(int(chosen[1]) + rng.choice((-10, -1, 1, 10)))
        if wrong.startswith("-"):
            continue
        text = made.text[: chosen.start(1)] + wrong
        ids = pair.tokenizer.encode(problem.prompt + text)
        left = task.max_new_tokens - len(ids) + len(made.prompt_ids)
        rest = pair.tokenizer.decode(_continue(decoder, ids, left), skip_special_tokens=True)
        found.append(task.equivalent(task.extract_answer(text + rest), problem.reference))
    return found


def _continue(decoder, prompt_ids: list[int], num_left: int) -> list[int]:
    if num_left < 1:
        return []
    return decoder.generate(prompt_ids, reprieve.SamplingParams(max_new_tokens=num_left)).token_ids


def auc(scores: list[float], labels: list[bool]) -> float:
    """Probability that an important mismatch scores above a harmless one; ties count half."""
    values, flags = torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)
    high, low = values[flags], values[~flags]
    wins = (high[:, None] > low[None]).double() + 0.5 * (high[:, None] == low[None]).double()
    return float(wins.mean())


def cost_ratio(pair: Pair, repeats: int = 40) -> float:
    """Draft forwards that a target forward takes, taking turns."""
    models = (pair.cached_target(), pair.cached_draft())
    times = [[forward_seconds(model, 1) for model in models] for _ in range(repeats)]
    return statistics.median(target / draft for target, draft in times)


def tree_tokens(pair: Pair, task: Task, head: str, problems: list[TaskProblem]) -> float:
    """Tokens a round of lossless decoding on EAGLE-3's trees at temperature 1."""
    decoder = pair.decoder("lossless", num_draft_tokens=6, drafter=f"eagle3:path={head},depth=6,total_tokens=32")
    made = [
        decoder.generate(
            problem.prompt,
            reprieve.SamplingParams(max_new_tokens=task.max_new_tokens, temperature=1.0, seed=number),
        )
        for number, problem in enumerate(problems)
    ]
    return sum(len(one.tokens) for one in made) / sum(one.num_rounds for one in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/pair-report"))
    parser.add_argument("--limit", type=int, default=500, help="test problems")
    parser.add_argument("--mine", type=int, default=100, help="training problems whose mismatches are labelled")
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--target", default="reprieve/arithmetic-pair")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--eagle", default=None, help="an EAGLE-3 head")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = reprieve.load_pair(arguments.target, arguments.draft, dtype="float32")
    task = load_task(arguments.task)
    values: dict[str, float] = {"cost_ratio": cost_ratio(pair)}
    document = {**environment(), "target": arguments.target, "draft": arguments.draft, "task": arguments.task}
    if arguments.limit:
        solved = document["accuracy"] = accuracies(pair, task, arguments.limit)
        for name, group in (("accuracy", ""), ("one_step", "one_step_")):
            for role in ("target", "draft"):
                if f"{group}{role}" in solved:
                    values[f"{name}_{role}"] = 100 * solved[f"{group}{role}"]["share"]
        values["union_gain"] = 100 * (solved["either"]["share"] - solved["target"]["share"])
        some = task.problems("test", min(arguments.limit, 100))
        values["wording_entropy"] = statistics.median(wording_entropies(pair, task, some))
        mended = repaired(pair, task, some)
        values["repaired"] = 100 * sum(mended) / max(1, len(mended))
    mismatches = walk(pair, task, task.problems("train", arguments.mine))
    if mismatches:
        labels = [m["important"] for m in mismatches]
        pairs = [(m["target_right"], m["draft_right"]) for m in mismatches]
        values |= {
            "share_important": 100 * sum(labels) / len(labels),
            "auc_log_prob": auc([-m["log_prob"] for m in mismatches], labels),
            "draft_better": 100 * pairs.count((False, True)) / len(pairs),
            "target_better": 100 * pairs.count((True, False)) / len(pairs),
            "both_wrong": 100 * pairs.count((False, False)) / len(pairs),
        }
        document["num_mismatches"] = len(mismatches)
        document["auc_rank"] = auc([m["rank"] for m in mismatches], labels)
    named = ((arguments.target, "target"), (arguments.draft, "draft"))
    folders = [Path(name) if name and Path(name).is_dir() else bundled_folder(role) for name, role in named]
    sizes = [path.stat().st_size for folder in folders for path in folder.glob("model*.safetensors")]
    values["weights_mb"] = sum(sizes) / 1e6
    if arguments.eagle:
        values["eagle_tree_tokens"] = tree_tokens(pair, task, arguments.eagle, task.problems("test", 60))
    document["properties"] = values
    for wanted in read_json(PROPERTIES, "the properties")["properties"]:
        low, high = wanted["range"]
        value = values.get(wanted["name"])
        verdict = "not measured" if value is None else "inside" if low <= value <= high else "OUTSIDE"
        shown = "" if value is None else f"{value:.3g}"
        print(f"{wanted['name']:20} {shown:>8}  [{low}, {high}] {wanted['unit']}: {verdict}")
    replace_file(arguments.out / "pair.json", json.dumps(document, indent=2) + "\n")
    lines = "".join(json.dumps(m) + "\n" for m in mismatches)
    replace_file(arguments.out / "mismatches.jsonl", lines)


if __name__ == "__main__":
    main()
