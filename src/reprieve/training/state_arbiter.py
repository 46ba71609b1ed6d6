"""The state arbiter from labels that say what both sides of a mismatch are worth: two logistic regressions."""

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
from reprieve.heads.state_arbiter import NEUTRAL, StateArbiter
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
    """Both heads, each with the C whose probabilities fit problems that were left out best; the recommended threshold
    is fixed, 0.5.

    The two probabilities are weighed against each other, so that they have to be right, not only in the right order;
    and a draft is better so rarely that one held-out part has too few cases to choose by.

    Args:
        folder: for checkpoints, from which a training that was cut off goes on; None keeps none.

    Raises:
        SpecError: labels that do not say what both sides are worth, or of one kind only.
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
    """One update tries one C: a fit without each fold, whose probabilities there are kept, then a fit to all."""

    def __init__(
        self, features: np.ndarray, labels: np.ndarray, problem_ids: np.ndarray, settings: StateArbiterTraining
    ) -> None:
        self.features = features
        self.labels = labels
        self.settings = settings
        self.folds = folds_by_problem(problem_ids, labels, num_folds=round(1 / settings.held_out), seed=settings.seed)
        self.fits: list[LinearFit] = []
        self.left_out: list[np.ndarray] = []  # [n] of each C: the probabilities of the fits that had not seen them

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
        """Of every C the loss, in nats a token, and the AUC on what was left out."""
        return [self._measured(number) for number in range(len(self.fits))]

    @property
    def best(self) -> int:
        """The C of least loss."""
        return int(np.argmin([row["log_loss"] for row in self.grid_log]))

    def state(self) -> dict[str, Tensor]:
        return {
            "fits": torch.tensor(np.array([fit.packed() for fit in self.fits])),
            "left_out": torch.tensor(np.array(self.left_out)),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.fits += [LinearFit.unpacked(row) for row in tensors["fits"].numpy()]
        self.left_out += list(tensors["left_out"].numpy())
