"""Train PAD's head: two-branch MLP, weighted cross-entropy, epoch of lowest validation loss (appendix B)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reprieve.heads.classifiers import PivotHead, pivot_logits
from reprieve.identity import PairIdentity
from reprieve.training.features import LabelledTokens, split_by_problem, summarise_held_out
from reprieve.training.settings import PivotTraining
from reprieve.types import Progress, no_progress


def train_pivot(
    tokens: LabelledTokens,
    pair: PairIdentity,
    task: str,
    *,
    settings: PivotTraining | None = None,
    progress: Progress = no_progress,
) -> PivotHead:
    """Train the head with the smallest validation loss; its recommended threshold catches 90% of the held-out pivots.

    Raises:
        SpecError: labels of one kind only.
    """
    settings = settings or PivotTraining()
    fit = _Fit(tokens, settings)
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


class _Fit:
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
