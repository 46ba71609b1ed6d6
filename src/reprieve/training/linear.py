"""Train linear heads: standardise, logistic regression, C chosen on left-out problems.

AutoJudge's head (section 3.2, appendix B) is one regression, the state arbiter two: one for each side of a mismatch.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.heads.binding import PairIdentity, digest
from reprieve.heads.classifiers import NEUTRAL, JudgeHead, StateArbiter
from reprieve.training.features import (
    LabelledTokens,
    auc,
    auc_interval,
    folds_by_problem,
    split_by_problem,
    summarise_held_out,
)
from reprieve.training.loop import Learner, Progress, train
from reprieve.training.settings import JudgeTraining, StateArbiterTraining

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
    folder: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> JudgeHead:
    """Train the head with the C that ranks held-out problems best.

    The recommended threshold catches 90% of the held-out important tokens.

    Args:
        folder: for the checkpoint from which an interrupted run resumes; None writes no checkpoint.

    Raises:
        SpecError: labels of one kind only.
        ReprieveError: a checkpoint of another recipe.
    """
    settings = settings or JudgeTraining()
    held = split_by_problem(tokens.problem_ids, tokens.important, held_out=settings.held_out, seed=settings.seed)
    learner = _JudgeLearner(tokens.features(settings.recipe), tokens.important, held, settings)
    train(learner, folder, progress=progress)
    best = learner.best
    threshold, summary = summarise_held_out(
        tokens, held, learner.scores[best][held], held_out=settings.held_out, seed=settings.seed
    )
    weight, bias = learner.fits[best].tensors()
    return JudgeHead(
        tensors={"weight": weight, "bias": bias},
        recipe=settings.recipe,
        pair=pair,
        task=task,
        threshold=threshold,
        training={**summary, "C": settings.grid[best], "grid": learner.grid_log},
    )


def train_state_arbiter(
    tokens: LabelledTokens,
    pair: PairIdentity,
    task: str,
    *,
    settings: StateArbiterTraining | None = None,
    folder: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> StateArbiter:
    """Train both heads, each with the C of lowest log loss on left-out problems; recommend threshold 0.5.

    The two probabilities are compared with each other, so they must be calibrated, not only well ranked. The draft's
    side is better so rarely that a single held-out set has too few cases, so C is chosen by cross-validation.

    Args:
        folder: for checkpoints from which an interrupted run resumes; None writes no checkpoints.

    Raises:
        SpecError: labels without the utilities of both sides, or of one kind only.
        ReprieveError: a checkpoint of another recipe.
    """
    settings = settings or StateArbiterTraining()
    if np.isnan(tokens.gains).any():
        raise SpecError("labels must say what both sides of a mismatch are worth: mine arbitration, or pivot")
    features = tokens.features(settings.recipe)
    fits, summary = [], {}
    for name, labels in (("worse", tokens.gains < 0), ("better", tokens.gains > 0)):
        num_folds = round(1 / settings.held_out)
        folds = folds_by_problem(tokens.problem_ids, labels, num_folds=num_folds, seed=settings.seed)
        learner = _SideLearner(features, labels, folds, settings)
        train(learner, None if folder is None else folder / name, progress=progress)
        fits.append(learner.fits[learner.best])
        summary[name] = {
            "num": int(labels.sum()),
            "num_folds": len(np.unique(folds)),
            "auc_held_out": auc_interval(labels, learner.scores[learner.best], tokens.problem_ids),
            "C": settings.grid[learner.best],
            "grid": learner.grid_log,
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


class _GridLearner(Learner):
    """Learner that tries one C of the grid per update.

    Args:
        features: [n, F].
        labels: [n], bool.
        parts: [n]: the part of the data that each token is in, which decides the fits that it takes part in.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray, parts: np.ndarray, settings: JudgeTraining) -> None:
        self.features = features
        self.labels = labels
        self.parts = parts
        self.settings = settings
        self.fits: list[LinearFit] = []  # one per C
        self.scores: list[np.ndarray] = []  # one per C: [n] probabilities

    @abstractmethod
    def fitted(self, c: float) -> tuple[LinearFit, np.ndarray]:
        """Return the fit with one C, and the probabilities that measure it."""

    @abstractmethod
    def measured(self, number: int) -> dict[str, float]:
        """Return the measures of the fit with the C of this number."""

    @property
    @abstractmethod
    def best(self) -> int:
        """Number of the best C."""

    @property
    def grid_log(self) -> list[dict[str, float]]:
        """Measures of every fit."""
        return [self.measured(number) for number in range(len(self.fits))]

    @property
    def num_updates(self) -> int:
        return len(self.settings.grid)

    @cached_property
    def recipe(self) -> str:
        return repr((self.settings, digest(self.features.tobytes() + self.labels.tobytes() + self.parts.tobytes())))

    def one_update(self, update: int) -> dict[str, float]:
        fit, scores = self.fitted(self.settings.grid[update])
        self.fits.append(fit)
        self.scores.append(scores)
        return self.measured(update)

    def state(self) -> dict[str, Tensor]:
        return {
            "fits": torch.tensor(np.array([[*fit.weight, fit.bias] for fit in self.fits])),
            "scores": torch.tensor(np.array(self.scores)),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.fits += [LinearFit(row[:-1], float(row[-1])) for row in tensors["fits"].numpy()]
        self.scores += list(tensors["scores"].numpy())


class _JudgeLearner(_GridLearner):
    """Learner that fits the training problems; the held-out ones are those of part True."""

    def fitted(self, c: float) -> tuple[LinearFit, np.ndarray]:
        fit = fit_linear(self.features[~self.parts], self.labels[~self.parts], c)
        return fit, fit.scores(self.features)

    def measured(self, number: int) -> dict[str, float]:
        held, left = (auc(self.labels[side], self.scores[number][side]) for side in (self.parts, ~self.parts))
        return {"C": self.settings.grid[number], "auc_held_out": held, "auc_train": left}

    @property
    def best(self) -> int:
        """Number of the C that ranks held-out problems best."""
        return int(np.argmax([np.nan_to_num(row["auc_held_out"]) for row in self.grid_log]))


class _SideLearner(_GridLearner):
    """Learner that fits without each fold, to score that fold, and then on all tokens."""

    def fitted(self, c: float) -> tuple[LinearFit, np.ndarray]:
        scores = np.empty(len(self.labels))
        for fold in np.unique(self.parts):
            inside = self.parts == fold
            scores[inside] = fit_linear(self.features[~inside], self.labels[~inside], c).scores(self.features[inside])
        return fit_linear(self.features, self.labels, c), scores

    def measured(self, number: int) -> dict[str, float]:
        loss, scores = float(log_loss(self.labels, self.scores[number])), self.scores[number]
        return {"C": self.settings.grid[number], "log_loss": loss, "auc": auc(self.labels, scores)}

    @property
    def best(self) -> int:
        """Number of the C with the lowest log loss."""
        return int(np.argmin([row["log_loss"] for row in self.grid_log]))
