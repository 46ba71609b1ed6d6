"""Train linear heads: standardise, logistic regression, C chosen on held-out problems.

AutoJudge's head (section 3.2, appendix B) is one regression, the state arbiter two: one for each side of a mismatch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.heads.classifiers import NEUTRAL, JudgeHead, StateArbiter
from reprieve.identity import PairIdentity
from reprieve.training.features import (
    LabelledTokens,
    auc,
    auc_interval,
    folds_by_problem,
    split_by_problem,
    summarise_held_out,
)
from reprieve.training.settings import JudgeTraining, StateArbiterTraining
from reprieve.types import Progress, no_progress

MAX_ITER = 500


@dataclass(frozen=True)
class LinearFit:
    """Logistic regression on raw features."""

    weight: np.ndarray  # [F], float64
    bias: float

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return P(important), [n]."""
        probabilities: np.ndarray = expit(features @ self.weight + self.bias)
        return probabilities

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return weights [F] and bias [], float32."""
        return torch.tensor(self.weight, dtype=torch.float32), torch.tensor(self.bias, dtype=torch.float32)


def fit_linear(features: np.ndarray, important: np.ndarray, c: float) -> LinearFit:
    """Fit a logistic regression on standardised features; C is scikit-learn's inverse strength of the L2 penalty."""
    mean, scale = features.mean(0), features.std(0)
    scale = np.where(scale > 1e-8, scale, 1.0)
    model = LogisticRegression(C=c, max_iter=MAX_ITER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # weak penalties rank well before convergence
        model.fit((features - mean) / scale, important)
    weight = (model.coef_[0] / scale).astype(np.float64)  # of raw features
    return LinearFit(weight, float(model.intercept_[0] - weight @ mean))


def train_judge(
    tokens: LabelledTokens,
    pair: PairIdentity,
    task: str,
    *,
    settings: JudgeTraining | None = None,
    progress: Progress = no_progress,
) -> JudgeHead:
    """Train the head with the C that ranks held-out problems best.

    The recommended threshold catches 90% of the held-out important tokens.

    Raises:
        SpecError: labels of one kind only.
    """
    settings = settings or JudgeTraining()
    features, labels = tokens.features(settings.recipe), tokens.important
    held = split_by_problem(tokens.problem_ids, labels, held_out=settings.held_out, seed=settings.seed)
    fits, scores, grid = [], [], []  # one per C
    for number, c in enumerate(settings.grid, start=1):
        fits.append(fit_linear(features[~held], labels[~held], c))
        scores.append(fits[-1].scores(features))
        auc_held_out, auc_train = (auc(labels[side], scores[-1][side]) for side in (held, ~held))
        grid.append({"C": c, "auc_held_out": auc_held_out, "auc_train": auc_train})
        progress(number, len(settings.grid))
    best = int(np.argmax([row["auc_held_out"] for row in grid]))
    threshold, summary = summarise_held_out(
        tokens, held, scores[best][held], held_out=settings.held_out, seed=settings.seed
    )
    weight, bias = fits[best].tensors()
    return JudgeHead(
        tensors={"weight": weight, "bias": bias},
        recipe=settings.recipe,
        pair=pair,
        task=task,
        threshold=threshold,
        training={**summary, "C": settings.grid[best], "grid": grid},
    )


def train_state_arbiter(
    tokens: LabelledTokens,
    pair: PairIdentity,
    task: str,
    *,
    settings: StateArbiterTraining | None = None,
    progress: Progress = no_progress,
) -> StateArbiter:
    """Train both heads, each with the C of lowest log loss on held-out problems; recommend threshold 0.5.

    The two probabilities are compared with each other, so they must be calibrated, not only well ranked. The draft's
    side is better so rarely that a single held-out set has too few cases, so C is chosen by cross-validation.

    Raises:
        SpecError: labels without the utilities of both sides, or of one kind only.
    """
    settings = settings or StateArbiterTraining()
    if np.isnan(tokens.gains).any():
        raise SpecError("labels must say what both sides of a mismatch are worth: mine arbitration, or pivot")
    features = tokens.features(settings.recipe)
    fits, summary = [], {}
    for name, labels in (("worse", tokens.gains < 0), ("better", tokens.gains > 0)):
        num_folds = round(1 / settings.held_out)
        folds = folds_by_problem(tokens.problem_ids, labels, num_folds=num_folds, seed=settings.seed)
        scores, grid = [], []  # one per C
        for number, c in enumerate(settings.grid, start=1):
            scores.append(_held_out_scores(features, labels, folds, c))
            grid.append({"C": c, "log_loss": float(log_loss(labels, scores[-1])), "auc": auc(labels, scores[-1])})
            progress(number, len(settings.grid))
        best = int(np.argmin([row["log_loss"] for row in grid]))
        fits.append(fit_linear(features, labels, settings.grid[best]))
        summary[name] = {
            "num": int(labels.sum()),
            "num_folds": len(np.unique(folds)),
            "auc_held_out": auc_interval(labels, scores[best], tokens.problem_ids),
            "C": settings.grid[best],
            "grid": grid,
        }
    weights, biases = zip(*(fit.tensors() for fit in fits), strict=True)
    return StateArbiter(
        tensors={"weight": torch.stack(weights), "bias": torch.stack(biases)},
        recipe=settings.recipe,
        pair=pair,
        task=task,
        threshold=NEUTRAL,
        training={
            "num_problems": len(np.unique(tokens.problem_ids)),
            "num_tokens": len(tokens.gains),
            "held_out": settings.held_out,
            "seed": settings.seed,
            **summary,
        },
    )


def _held_out_scores(
    features: np.ndarray,  # [n, F]
    labels: np.ndarray,  # [n], bool
    folds: np.ndarray,  # [n]
    c: float,
) -> np.ndarray:  # [n]
    """Return the probability of every token, from a fit without the token's fold."""
    scores = np.empty(len(labels))
    for fold in np.unique(folds):
        inside = folds == fold
        scores[inside] = fit_linear(features[~inside], labels[~inside], c).scores(features[inside])
    return scores
