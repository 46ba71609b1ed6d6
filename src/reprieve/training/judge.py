"""Train AutoJudge's head: standardise, logistic regression, C chosen on held-out problems (section 3.2, appendix B)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from reprieve.heads.binding import PairIdentity, digest
from reprieve.heads.classifiers import JudgeHead
from reprieve.training.features import LabelledTokens
from reprieve.training.loop import Learner, Progress, train
from reprieve.training.settings import JudgeTraining
from reprieve.training.splits import auc, split_by_problem, summarise_held_out

MAX_ITER = 500


@dataclass(frozen=True)
class LinearFit:
    """Logistic regression on standardised features."""

    mean: np.ndarray  # [F]
    scale: np.ndarray  # [F]
    coefficients: np.ndarray  # [F]
    intercept: float

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return P(important), [n]."""
        logits = ((features - self.mean) / self.scale) @ self.coefficients + self.intercept
        risks: np.ndarray = 1 / (1 + np.exp(-logits.clip(-80, 80)))
        return risks

    def packed(self) -> np.ndarray:
        """Concatenate all parameters, [1 + 3F]."""
        return np.concatenate([[self.intercept], self.mean, self.scale, self.coefficients])

    @classmethod
    def unpacked(cls, row: np.ndarray) -> Self:
        """Inverse of `packed`."""
        mean, scale, coefficients = row[1:].reshape(3, -1)
        return cls(mean, scale, coefficients, float(row[0]))

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weights [F] and bias [] for raw features, float32."""
        weight = self.coefficients / self.scale
        bias = self.intercept - float(weight @ self.mean)
        return torch.tensor(weight, dtype=torch.float32), torch.tensor(bias, dtype=torch.float32)


def fit_linear(features: np.ndarray, important: np.ndarray, c: float) -> LinearFit:
    """Fit a logistic regression on standardised features; C is scikit-learn's inverse strength of the L2 penalty."""
    mean, scale = features.mean(0), features.std(0)
    scale = np.where(scale > 1e-8, scale, 1.0)
    model = LogisticRegression(C=c, max_iter=MAX_ITER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # weak penalties rank well before convergence
        model.fit((features - mean) / scale, important)
    return LinearFit(mean, scale, model.coef_[0], float(model.intercept_[0]))


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
    learner = JudgeLearner(tokens, settings)
    train(learner, folder, progress=progress)
    chosen, held = learner.best, learner.held
    best = learner.fits[chosen]
    threshold, summary = summarise_held_out(
        tokens, held, best.scores(learner.features[held]), held_out=settings.held_out, seed=settings.seed
    )
    weight, bias = best.folded()
    return JudgeHead(
        tensors={"weight": weight, "bias": bias},
        recipe=settings.recipe,
        pair=pair,
        task=task,
        threshold=threshold,
        training={**summary, "C": settings.grid[chosen], "grid": learner.grid_log},
    )


class JudgeLearner(Learner):
    """Learner that fits one C of the grid per update."""

    def __init__(self, tokens: LabelledTokens, settings: JudgeTraining) -> None:
        self.settings = settings
        self.important = tokens.important
        self.features = tokens.features(settings.recipe)
        self.held = split_by_problem(
            tokens.problem_ids, tokens.important, held_out=settings.held_out, seed=settings.seed
        )
        self.fits: list[LinearFit] = []

    @property
    def num_updates(self) -> int:
        return len(self.settings.grid)

    @cached_property
    def recipe(self) -> str:
        return repr((self.settings, digest(self.features.tobytes() + self.important.tobytes())))

    def one_update(self, update: int) -> dict[str, float]:
        c = self.settings.grid[update]
        self.fits.append(fit_linear(self.features[~self.held], self.important[~self.held], c))
        return self._aucs(update)

    def _aucs(self, number: int) -> dict[str, float]:
        fit = self.fits[number]
        held, left = (auc(self.important[side], fit.scores(self.features[side])) for side in (self.held, ~self.held))
        return {"C": self.settings.grid[number], "auc_held_out": held, "auc_train": left}

    @cached_property
    def grid_log(self) -> list[dict[str, float]]:
        """C and both AUCs of every fit."""
        return [self._aucs(number) for number in range(len(self.fits))]

    @property
    def best(self) -> int:
        """Index of the fit that ranks held-out problems best."""
        scores = [np.nan_to_num(row["auc_held_out"]) for row in self.grid_log]
        return int(np.argmax(scores))

    def state(self) -> dict[str, Tensor]:
        return {"fits": torch.tensor(np.array([fit.packed() for fit in self.fits]))}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.fits += [LinearFit.unpacked(row) for row in tensors["fits"].numpy()]
