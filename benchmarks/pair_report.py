"""Is the bundled pair a fair miniature? `python benchmarks/pair_report.py --out runs/pair-report`.

Measures accuracy, the oracle union, tokens per round, forward times and weights, and how far the target's
log-probability alone separates important mismatches from harmless ones. Mismatches are labelled by AutoJudge's
Algorithm 1 in its plainest form: replace, regenerate with the target, compare answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import reprieve
from reprieve.engine import Pair
from reprieve.evaluation.runner import environment
from reprieve.files import replace_file
from reprieve.heads.files import bundled_folder
from reprieve.metrics import wilson_interval
from reprieve.tasks import Task, load_task


def accuracies(pair: Pair, task: Task, num_problems: int) -> dict:
    """Target, draft and the oracle union on the test split; tokens per round of lossless at K = 16."""
    solved: dict[str, list[bool]] = {"target_only": [], "draft_only": []}
    decoders = {name: pair.decoder(name) for name in solved}
    lossless = pair.decoder("lossless", num_draft_tokens=16)
    params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)
    num_tokens = num_rounds = num_different = 0
    for problem in task.problems("test", num_problems):
        made = {name: decoder.generate(problem.prompt, params) for name, decoder in decoders.items()}
        for name, generation in made.items():
            solved[name].append(task.equivalent(task.extract_answer(generation.text), problem.reference))
        fast = lossless.generate(problem.prompt, params)
        num_tokens += len(fast.tokens)
        num_rounds += fast.num_rounds
        num_different += fast.token_ids != made["target_only"].token_ids
    solved["either"] = [a or b for a, b in zip(solved["target_only"], solved["draft_only"], strict=True)]
    return {
        "num_problems": num_problems,
        **{n: {"accuracy": sum(s) / len(s), "ci95": wilson_interval(sum(s), len(s))} for n, s in solved.items()},
        "lossless_differs_from_target": num_different,
        "tokens_per_round": num_tokens / num_rounds,
    }


@torch.inference_mode()
def mine(pair: Pair, task: Task, num_problems: int) -> list[dict]:
    """Labelled mismatches of some training problems: important or not, rank and log-probability under the target."""
    decoder = pair.decoder("target_only")
    found = []
    for problem in task.problems("train", num_problems):
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
            important = not task.equivalent(task.extract_answer(pair.tokenizer.decode(swapped)), reference)
            log_probs = logits.log_softmax(-1)
            found.append(
                {
                    "problem_id": problem.problem_id,
                    "important": important,
                    "draft_token": pair.tokenizer.decode([drafted[place]]),
                    "target_token": pair.tokenizer.decode([answer_ids[place]]),
                    "log_prob": float(log_probs[drafted[place]]),
                    "rank": int((logits > logits[drafted[place]]).sum()) + 1,
                }
            )
            if not important:
                answer_ids = swapped
            place += 1
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/pair-report"))
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--mine", type=int, default=100, help="training problems to mine")
    parser.add_argument("--target", default="reprieve/arithmetic-pair")
    parser.add_argument("--draft", default=None)
    arguments = parser.parse_args()
    pair = reprieve.load_pair(arguments.target, arguments.draft, dtype="float32")
    task = load_task("arithmetic")
    document = {**environment(), "accuracy": accuracies(pair, task, arguments.limit)} if arguments.limit else {}
    print(json.dumps(document.get("accuracy"), indent=2), flush=True)
    mismatches = mine(pair, task, arguments.mine)
    labels = [m["important"] for m in mismatches]
    document["mismatches"] = {
        "num_problems": arguments.mine,
        "num_mismatches": len(mismatches),
        "share_important": sum(labels) / len(labels),
        "auc_log_prob": auc([-m["log_prob"] for m in mismatches], labels),
        "auc_rank": auc([m["rank"] for m in mismatches], labels),
    }
    folders = [bundled_folder(role) for role in ("target", "draft")]
    document["weights_mb"] = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors")) / 1e6
    print(json.dumps(document["mismatches"], indent=2))
    replace_file(arguments.out / "pair.json", json.dumps(document, indent=2) + "\n")
    lines = "".join(json.dumps(m) + "\n" for m in mismatches)
    replace_file(arguments.out / "mismatches.jsonl", lines)


if __name__ == "__main__":
    main()
