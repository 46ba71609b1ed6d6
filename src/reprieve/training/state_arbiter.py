"""Train the state arbiter on labels of both sides of a mismatch: two logistic regressions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import log_loss
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.heads.binding import PairIdentity, digest
from reprieve.heads.classifiers import NEUTRAL, StateArbiter
from reprieve.training.features import LabelledTokens
from reprieve.training.judge import LinearFit, fit_linear
from reprieve.training.loop import Learner, Progress, train
from reprieve.training.settings import StateArbiterTraining
from reprieve.training.splits import auc, auc_interval, folds_by_problem


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
        learner = _SideLearner(features, labels, tokens.problem_ids, settings)
        train(learner, None if folder is None else folder / name, progress=progress)
        fits.append(learner.fits[learner.best])
        summary[name] = {
            "num": int(labels.sum()),
            "num_folds": len(np.unique(learner.folds)),
            "auc_held_out": auc_interval(labels, learner.left_out[learner.best], tokens.problem_ids),
            "C": settings.grid[learner.best],
            "grid": learner.grid_log,
        }
    weights, biases = zip(*(fit.folded() for fit in fits), strict=True)
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


class _SideLearner(Learner):
    """Learner that tries one C per update: a fit without each fold, scored on that fold, then a fit on all."""

    def __init__(
        self, features: np.ndarray, labels: np.ndarray, problem_ids: np.ndarray, settings: StateArbiterTraining
    ) -> None:
        self.features = features
        self.labels = labels
        self.settings = settings
        self.folds = folds_by_problem(problem_ids, labels, num_folds=round(1 / settings.held_out), seed=settings.seed)
        self.fits: list[LinearFit] = []
        self.left_out: list[np.ndarray] = []  # per C: [n] out-of-fold probabilities

    @property
    def num_updates(self) -> int:
        return len(self.settings.grid)

    @cached_property
    def recipe(self) -> str:
        return repr((self.settings, digest(self.features.tobytes() + self.labels.tobytes() + self.folds.tobytes())))

    def one_update(self, update: int) -> dict[str, float]:
        c = self.settings.grid[update]
        scores = np.empty(len(self.labels))
        for fold in np.unique(self.folds):
            inside = self.folds == fold
            fit = fit_linear(self.features[~inside], self.labels[~inside], c)
            scores[inside] = fit.scores(self.features[inside])
        self.left_out.append(scores)
        self.fits.append(fit_linear(self.features, self.labels, c))
        return self._measured(update)

    def _measured(self, number: int) -> dict[str, float]:
        scores = self.left_out[number]
        return {
            "C": self.settings.grid[number],
            "log_loss": float(log_loss(self.labels, scores)),
            "auc": auc(self.labels, scores),
        }

    @property
    def grid_log(self) -> list[dict[str, float]]:
        """Loss, in nats per token, and AUC on left-out problems for every C."""
        return [self._measured(number) for number in range(len(self.fits))]

    @property
    def best(self) -> int:
        """Index of the C with the lowest log loss."""
        return int(np.argmin([row["log_loss"] for row in self.grid_log]))

    def state(self) -> dict[str, Tensor]:
        return {
            "fits": torch.tensor(np.array([fit.packed() for fit in self.fits])),
            "left_out": torch.tensor(np.array(self.left_out)),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.fits += [LinearFit.unpacked(row) for row in tensors["fits"].numpy()]
        self.left_out += list(tensors["left_out"].numpy())
