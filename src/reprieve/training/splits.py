"""Splits by problem, and metrics of scores with intervals over problems."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from reprieve.errors import SpecError, require_range
from reprieve.stats import bootstrap_interval
from reprieve.training.features import LabelledTokens

RECALL = 0.9  # minimum share of important tokens that AutoJudge's thresholds catch


def split_by_problem(
    problem_ids: np.ndarray,  # [n], of each token
    important: np.ndarray,  # [n], bool
    *,
    held_out: float,
    seed: int,
) -> np.ndarray:  # [n], bool: held out
    """Hold out whole problems, because the tokens of one text are too similar to be split.

    Raises:
        SpecError: a share outside (0, 0.9], fewer than two problems, or a side with labels of one kind only.
    """
    require_range("held_out", held_out, 0.0, 0.9, low_open=True)
    problems = np.unique(problem_ids)
    if len(problems) < 2:
        raise SpecError(f"labels must come from at least 2 problems to hold some out, got {len(problems)}")
    order = np.random.default_rng(seed).permutation(len(problems))
    num_held = min(max(1, round(held_out * len(problems))), len(problems) - 1)
    held = np.isin(problem_ids, problems[order[:num_held]])
    for side, name in ((~held, "training"), (held, "held-out")):
        if len(np.unique(important[side])) < 2:
            raise SpecError(
                f"the {name} problems must hold important and unimportant tokens, got {int(important[side].sum())} "
                f"important of {int(side.sum())}; mine more problems"
            )
    return held


def folds_by_problem(
    problem_ids: np.ndarray,  # [n], of each token
    labels: np.ndarray,  # [n], bool
    *,
    num_folds: int,
    seed: int,
) -> np.ndarray:  # [n], the fold of each token, from 0
    """Assign whole problems to folds, spreading those with labelled tokens evenly; no more folds than such problems.

    Raises:
        SpecError: fewer than two problems with labelled tokens, or with other tokens, or all other tokens in one fold.
    """
    labelled = np.unique(problem_ids[labels])
    for side, name in ((labelled, "labelled"), (np.unique(problem_ids[~labels]), "other")):
        if len(side) < 2:
            raise SpecError(f"at least 2 problems must hold {name} tokens, got {len(side)}; mine more problems")
    others = np.setdiff1d(problem_ids, labelled)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(labelled), rng.permutation(others)])
    fold_of = {problem: index % min(num_folds, len(labelled)) for index, problem in enumerate(order)}
    folds = np.array([fold_of[problem_id] for problem_id in problem_ids])
    if len(np.unique(folds[~labels])) < 2:
        num = len(np.unique(problem_ids[~labels]))
        raise SpecError(f"all other tokens, of {num} problems, fell into one fold; mine more, or change --seed")
    return folds


def auc(important: np.ndarray, scores: np.ndarray) -> float:
    """Return the ROC AUC; NaN if only one label occurs."""
    return float(roc_auc_score(important, scores)) if 0 < important.sum() < len(important) else float("nan")


def auc_interval(important: np.ndarray, scores: np.ndarray, problem_ids: np.ndarray, *, seed: int = 0) -> list[float]:
    """Return the AUC with a 95% bootstrap interval over problems: [auc, low, high]."""
    problems = np.unique(problem_ids)
    rows = [np.flatnonzero(problem_ids == problem) for problem in problems]

    def resampled(index: np.ndarray) -> float:
        chosen = np.concatenate([rows[i] for i in index])
        return auc(important[chosen], scores[chosen])

    low, high = bootstrap_interval(resampled, len(problems), seed=seed, num_resamples=1000)
    known = np.isfinite(low) and np.isfinite(high)  # with few problems, most resamples have only one kind of label
    return [auc(important, scores), low if known else 0.0, high if known else 1.0]


def threshold_at_recall(important: np.ndarray, scores: np.ndarray, recall: float) -> float:
    """Return the largest threshold that still refuses `recall` of the important tokens (risk above it is refused)."""
    risks = np.sort(scores[important])
    num_missed = len(risks) - int(np.ceil(recall * len(risks) - 1e-9))
    below = float(risks[num_missed])
    rounded = float(f"{below:.3g}")  # easy to type
    return rounded if rounded < below else float(f"{below * 0.995:.3g}")


def summarise_held_out(
    tokens: LabelledTokens,
    held: np.ndarray,  # [n], bool
    scores: np.ndarray,  # [number held out], of the held-out tokens
    *,
    held_out: float,
    seed: int,
) -> tuple[float, dict[str, Any]]:
    """Return the recommended threshold, which refuses 90% of the held-out important tokens, and the card's facts."""
    important = tokens.important[held]
    threshold = threshold_at_recall(important, scores, RECALL)
    return threshold, {
        "num_problems": len(np.unique(tokens.problem_ids)),
        "num_tokens": len(tokens.important),
        "num_important": int(tokens.important.sum()),
        "held_out": held_out,
        "seed": seed,
        "auc_held_out": auc_interval(important, scores, tokens.problem_ids[held]),
        "recall_at_threshold": RECALL,
        "acceptance_at_threshold": float((scores[~important] <= threshold).mean()),
    }
