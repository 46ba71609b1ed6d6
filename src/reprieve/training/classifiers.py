"""Train heads that classify drafted tokens: AutoJudge's, PAD's and the state arbiter.

AutoJudge's (section 3.2, appendix B) is a logistic regression on standardised features, with C chosen on held-out
problems; the state arbiter has two, one for each side of a mismatch. PAD's (appendix B) is a two-branch MLP, with a
weighted cross-entropy, at the epoch of lowest validation loss.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reprieve.errors import SpecError
from reprieve.heads.classifiers import NEUTRAL, JudgeHead, PivotHead, StateArbiter, pivot_logits
from reprieve.identity import PairIdentity
from reprieve.training.features import (
    LabelledTokens,
    auc,
    auc_interval,
    folds_by_problem,
    split_by_problem,
    summarise_held_out,
)
from reprieve.training.settings import JudgeTraining, PivotTraining, StateArbiterTraining
from reprieve.types import Progress, no_progress

_MAX_ITER = 500


@dataclass(frozen=True)
class LinearFit:
    """Logistic regression on raw features."""

    weight: np.ndarray  # [F], float64
    bias: float

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return the probability of the positive label, [n]."""
        probabilities: np.ndarray = expit(features @ self.weight + self.bias)
        return probabilities

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return weights [F] and bias [], float32."""
        return torch.tensor(self.weight, dtype=torch.float32), torch.tensor(self.bias, dtype=torch.float32)


def fit_linear(features: np.ndarray, important: np.ndarray, c: float) -> LinearFit:
    """Fit a logistic regression on standardised features; C is scikit-learn's inverse strength of the L2 penalty."""
    mean, scale = features.mean(0), features.std(0)
    scale = np.where(scale > 1e-8, scale, 1.0)
    model = LogisticRegression(C=c, max_iter=_MAX_ITER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # weak penalties rank well before convergence
        model.fit((features - mean) / scale, important)
    weight = (model.coef_[0] / scale).astype(np.float64)  # of raw features
    return LinearFit(weight, float(model.intercept_[0] - weight @ mean))


def train_judge(
    tokens: LabelledTokens, pair: PairIdentity, task: str, *, settings: JudgeTraining, progress: Progress = no_progress
) -> JudgeHead:
    """Train AutoJudge's head with the C that ranks held-out problems best.

    The recommended threshold catches 90% of the held-out important tokens.

    Raises:
        SpecError: labels of one kind only.
    """
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
    settings: StateArbiterTraining,
    progress: Progress = no_progress,
) -> StateArbiter:
    """Train the state arbiter's two heads, each with the C of lowest log loss on held-out problems; threshold 0.5.

    The two probabilities are compared with each other, so they must be calibrated, not only well ranked. The draft's
    side is better so rarely that a single held-out set has too few cases, so C is chosen by cross-validation.

    Raises:
        SpecError: labels without the utilities of both sides, or of one kind only.
    """
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


def train_pivot(
    tokens: LabelledTokens, pair: PairIdentity, task: str, *, settings: PivotTraining, progress: Progress = no_progress
) -> PivotHead:
    """Train PAD's head to the smallest validation loss; its recommended threshold catches 90% of the held-out pivots.

    Raises:
        SpecError: labels of one kind only.
    """
    fit = _PivotFit(tokens, settings)
    for epoch in range(settings.num_epochs):
        fit.one_epoch(epoch)
        progress(epoch + 1, settings.num_epochs)
        if fit.finished():
            break
    tensors = {**fit.best, **fit.standard}
    head = PivotHead(tensors=tensors, recipe=settings.recipe, pair=pair, task=task, threshold=0.5)
    scores = head.probability(fit.features[torch.tensor(fit.held)]).numpy().astype(np.float64)
    threshold, summary = summarise_held_out(tokens, fit.held, scores, held_out=settings.held_out, seed=settings.seed)
    training = {**summary, "settings": dataclasses.asdict(settings), "losses": fit.losses}
    return dataclasses.replace(head, threshold=threshold, training=training)


class _PivotFit:
    """Network in training, and its weights of lowest validation loss."""

    def __init__(self, tokens: LabelledTokens, settings: PivotTraining) -> None:
        self.settings = settings
        self.features = torch.tensor(tokens.features(settings.recipe))
        self.labels = torch.tensor(tokens.important).long()
        self.held = split_by_problem(
            tokens.problem_ids, tokens.important, held_out=settings.held_out, seed=settings.seed
        )
        training = self.features[torch.tensor(~self.held)]
        self.standard = {"mean": training.mean(0), "scale": training.std(0).clamp_min(1e-6)}
        counts = torch.bincount(self.labels[torch.tensor(~self.held)], minlength=2).float()
        self.class_weights = counts.sum() / (2 * counts.clamp_min(1))
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            self.model = self._build()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.best = self._weights()
        self.losses: list[list[float]] = []  # [training, validation] of every epoch

    def _build(self) -> nn.ModuleDict:
        settings = self.settings
        sizes = {
            "hidden": (self.features.shape[1] - 2, settings.hidden_size),
            "scalars": (2, settings.scalar_size),
            "fuse": (settings.hidden_size + settings.scalar_size, settings.fuse_size),
            "out": (settings.fuse_size, 2),
        }
        return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def one_epoch(self, epoch: int) -> None:
        """Train on every batch and measure the validation loss."""
        settings, mean, scale = self.settings, self.standard["mean"], self.standard["scale"]
        rows = torch.tensor(~self.held).nonzero().squeeze(-1)
        losses = []
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed * 1_000_003 + epoch)
            for batch in rows[torch.randperm(len(rows))].split(settings.batch_size):
                inputs = nn.functional.dropout((self.features[batch] - mean) / scale, settings.dropout) * scale + mean
                loss = self._loss(inputs, batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
        held = torch.tensor(self.held).nonzero().squeeze(-1)
        with torch.no_grad():
            held_loss = float(self._loss(self.features[held], held))
        if not self.losses or held_loss < min(loss for _, loss in self.losses):
            self.best = self._weights()
        self.losses.append([float(np.mean(losses)), held_loss])

    def _loss(self, inputs: Tensor, rows: Tensor) -> Tensor:
        named = dict(self.model.named_parameters())
        return cross_entropy(
            pivot_logits(inputs, {**named, **self.standard}), self.labels[rows], weight=self.class_weights
        )

    def finished(self) -> bool:
        """Return True if the validation loss has not fallen for `patience` epochs."""
        held = [loss for _, loss in self.losses]
        return len(held) - 1 - held.index(min(held)) >= self.settings.patience
