"""Effect of precision and of parallel forwards on features: `python benchmarks/precision.py`.

AutoJudge, appendix C: compares states from token-by-token forwards and from one parallel forward, in float32 and in
bfloat16, and a head's scores of each. The head was trained on parallel float32 states. Writes precision.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import reprieve
from arms import labels_of, over, part, run, whole, write_parts
from reprieve.engine import Pair
from reprieve.heads.classifiers import JudgeHead
from reprieve.mining.store import ProblemLabels
from reprieve.training.features import auc_interval, collect, split_by_problem


@torch.inference_mode()
def sequential(pair: Pair, problems: list[ProblemLabels]) -> np.ndarray:
    """Return the last hidden states of all labelled drafted tokens, computed token by token: [n, D]."""
    model = pair.cached_target((-1,))
    rows = []
    for problem in problems:
        by_position = {mismatch.position: mismatch for mismatch in problem.labelled()}
        model.start(list(problem.prompt_ids))
        for position, token_id in enumerate(problem.response_ids):
            length = model.length
            if position in by_position and by_position[position].draft_id != token_id:
                rows.append(model.forward([by_position[position].draft_id])[1][-1][0])
                model.truncate(length)
            states = model.forward([token_id])[1][-1][0]
            if position in by_position and by_position[position].draft_id == token_id:
                rows.append(states)
    return torch.stack(rows).float().numpy()


def measure(head: JudgeHead, features: np.ndarray, important: np.ndarray, problem_ids: np.ndarray) -> list[str]:
    """Return the head's AUC on features, and its recall and acceptance at its threshold, in percent."""
    scores = head.probability(torch.tensor(features)).numpy().astype(np.float64)
    refused = scores > head.threshold
    shares = (f"{100 * share:.1f}" for share in (refused[important].mean(), (~refused[~important]).mean()))
    return [over(auc_interval(important, scores, problem_ids)), *shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=Path, default=Path("benchmarks/labels/miniature-autojudge"))
    parser.add_argument("--head", default="reprieve/miniature-judge")
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--limit", type=whole(1), default=100, help="held-out problems")
    parser.add_argument("--out", type=Path, default=Path("runs/precision-report"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    head = JudgeHead.from_pretrained(arguments.head)
    labelled = labels_of(reprieve.load_pair(arguments.target), arguments.labels).problems()
    ids = np.concatenate([[p.problem_id] * len(p.labelled()) for p in labelled])
    flags = np.concatenate([[bool(m.important) for m in p.labelled()] for p in labelled]).astype(bool)
    training = head.training
    held = set(ids[split_by_problem(ids, flags, held_out=training["held_out"], seed=training["seed"])])
    problems = [problem for problem in labelled if problem.problem_id in held][: arguments.limit]
    rows: list[list[str]] = []
    reference, num_tokens = None, 0
    for dtype in ("float32", "bfloat16"):
        pair = reprieve.load_pair(arguments.target, dtype=dtype)
        tokens = collect(pair, problems, draft_layers=())
        ways = {"parallel": tokens.features(head.recipe), "token by token": sequential(pair, problems)}
        reference = ways["parallel"] if reference is None else reference
        for way, features in ways.items():
            far = np.linalg.norm(features - reference, axis=1) / np.linalg.norm(reference, axis=1)
            measured = measure(head, features, tokens.important, tokens.problem_ids)
            rows.append([f"{way}, {dtype}", f"{np.median(far):.1e} ({far.max():.1e})", *measured])
        num_tokens = len(tokens.important)
    columns = [
        "states",
        "relative difference, median (largest)",
        "ROC AUC",
        "important refused, %",
        "others accepted, %",
    ]
    note = f"{len(problems)} held-out problems, {num_tokens} mismatches, threshold {head.threshold:g}."
    write_parts(arguments.out / "precision.json", {"precision": part(columns, rows, note)})


if __name__ == "__main__":
    run(main)
