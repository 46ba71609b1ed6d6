"""AutoJudge's head from labels: standardise, logistic regression, C by held-out problems (section 3.2, appendix B)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from reprieve.errors import SpecError
from reprieve.heads.binding import PairIdentity
from reprieve.heads.features import JUDGE_TARGET, FeatureRecipe
from reprieve.heads.judge import JudgeHead
from reprieve.training.features import LabelledTokens
from reprieve.training.splits import auc, split_by_problem, summarise_held_out

GRID = tuple(10.0**-power for power in range(8))  # 1e0 to 1e-7
MAX_ITER = 500


@dataclass(frozen=True)
class LinearFit:
    """A logistic regression on standardised features."""

    mean: np.ndarray  # [F]
    scale: np.ndarray  # [F]
    coefficients: np.ndarray  # [F]
    intercept: float

    def scores(self, features: np.ndarray) -> np.ndarray:
        """P(important), [n]."""
        logits = ((features - self.mean) / self.scale) @ self.coefficients + self.intercept
        return 1 / (1 + np.exp(-logits.clip(-80, 80)))


def fit_linear(features: np.ndarray, important: np.ndarray, c: float) -> LinearFit:
    """Standardise and fit; C is scikit-learn's inverse strength of the L2 penalty."""
    mean, scale = features.mean(0), features.std(0)
    scale = np.where(scale > 1e-8, scale, 1.0)
    model = LogisticRegression(C=c, max_iter=MAX_ITER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # weak penalties need not converge to rank well
        model.fit((features - mean) / scale, important)
    return LinearFit(mean, scale, model.coef_[0], float(model.intercept_[0]))


def require_grid(grid: Sequence[float]) -> None:
    """Refuse values of C that are no finite positive numbers.

    Raises:
        SpecError: names the values.
    """
    if not grid or not all(0 < c < float("inf") for c in grid):
        raise SpecError(f"grid must hold finite values of C above 0, got {list(grid)}")


def train_judge(
    tokens: LabelledTokens,
    pair: PairIdentity,
    task: str,
    *,
    recipe: FeatureRecipe = JUDGE_TARGET,
    grid: Sequence[float] = GRID,
    held_out: float = 0.1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> JudgeHead:
    """The head with the C that ranks held-out problems best.

    The recommended threshold catches 90% of the held-out important tokens.

    Raises:
        SpecError: an empty grid, or labels of one kind only.
    """
    require_grid(grid)
    features = tokens.features(recipe)
    held = split_by_problem(tokens.problem_ids, tokens.important, held_out=held_out, seed=seed)
    trials = []
    for number, c in enumerate(grid):
        fit = fit_linear(features[~held], tokens.important[~held], c)
        held_auc = auc(tokens.important[held], fit.scores(features[held]))
        trials.append((c, held_auc, auc(tokens.important[~held], fit.scores(features[~held])), fit))
        progress(number + 1, len(grid))
    best_c, _, _, best = max(trials, key=lambda trial: np.nan_to_num(trial[1]))
    threshold, summary = summarise_held_out(tokens, held, best.scores(features[held]), held_out=held_out, seed=seed)
    grid_log = [{"C": c, "auc_held_out": ours, "auc_train": theirs} for c, ours, theirs, _ in trials]
    weight = torch.tensor(best.coefficients / best.scale, dtype=torch.float32)
    bias = torch.tensor(best.intercept - float((best.coefficients / best.scale) @ best.mean), dtype=torch.float32)
    return JudgeHead(
        tensors={"weight": weight, "bias": bias},
        recipe=recipe,
        pair=pair,
        task=task,
        threshold=threshold,
        training={**summary, "C": best_c, "grid": grid_log},
    )
