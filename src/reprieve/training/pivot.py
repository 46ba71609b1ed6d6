"""PAD's head from labels: a two-branch MLP, weighted cross-entropy, the epoch of least validation loss (appendix B)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reprieve.errors import SpecError, require_range
from reprieve.heads.binding import PairIdentity
from reprieve.heads.features import PIVOT, FeatureRecipe
from reprieve.heads.pivot import PivotHead, pivot_logits
from reprieve.training.features import LabelledTokens
from reprieve.training.splits import split_by_problem, summarise_held_out


@dataclass(frozen=True)
class PivotTraining:
    """What the paper leaves open: sizes and optimisation. AdamW on shuffled batches.

    Args:
        hidden_size: of the branch on the hidden state; `scalar_size` of the other, `fuse_size` of their union.
        dropout: share of the standardised features set to their mean, while training; [0, 1).
    """

    hidden_size: int = 64
    scalar_size: int = 16
    fuse_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    dropout: float = 0.3
    batch_size: int = 128
    num_epochs: int = 60
    patience: int = 10  # epochs without a lower validation loss

    def __post_init__(self) -> None:
        for name in ("hidden_size", "scalar_size", "fuse_size", "batch_size", "num_epochs", "patience"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be 1 or more, got {getattr(self, name)!r}")
        require_range("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        require_range("weight_decay", self.weight_decay, 0.0, 10.0)
        require_range("dropout", self.dropout, 0.0, 0.9)


def train_pivot(
    tokens: LabelledTokens,
    pair: PairIdentity,
    task: str,
    *,
    recipe: FeatureRecipe = PIVOT,
    held_out: float = 0.2,
    seed: int = 0,
    settings: PivotTraining | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PivotHead:
    """The head of least validation loss; its recommended threshold catches 90% of the held-out pivots.

    Raises:
        SpecError: labels of one kind only.
    """
    settings = settings or PivotTraining()
    features = torch.tensor(tokens.features(recipe))
    labels = torch.tensor(tokens.important).long()
    held = split_by_problem(tokens.problem_ids, tokens.important, held_out=held_out, seed=seed)
    training, validation = torch.tensor(~held), torch.tensor(held)
    mean, scale = features[training].mean(0), features[training].std(0).clamp_min(1e-6)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tensors, log = _fit(features, labels, training, validation, mean, scale, settings, progress)
    head = PivotHead(tensors=tensors, recipe=recipe, pair=pair, task=task, threshold=0.5)
    scores = head.probability(features[validation]).numpy().astype(np.float64)
    threshold, summary = summarise_held_out(tokens, held, scores, held_out=held_out, seed=seed)
    made = {**summary, "settings": dataclasses.asdict(settings), "losses": log}
    return dataclasses.replace(head, threshold=threshold, training=made)


def _fit(
    features: Tensor,
    labels: Tensor,
    training: Tensor,  # [n], bool
    validation: Tensor,  # [n], bool
    mean: Tensor,
    scale: Tensor,
    settings: PivotTraining,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Weights of the best epoch, and the losses [training, validation] of every one."""
    sizes = {
        "hidden": (features.shape[1] - 2, settings.hidden_size),
        "scalars": (2, settings.scalar_size),
        "fuse": (settings.hidden_size + settings.scalar_size, settings.fuse_size),
        "out": (settings.fuse_size, 2),
    }
    layers = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    optimizer = torch.optim.AdamW(layers.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    counts = torch.bincount(labels[training], minlength=2).float()
    weights = counts.sum() / (2 * counts.clamp_min(1))
    standard = {"mean": mean, "scale": scale}
    best, best_loss, since, log = copy.deepcopy(layers.state_dict()), float("inf"), 0, []
    rows = training.nonzero().squeeze(-1)
    for epoch in range(settings.num_epochs):
        losses = []
        for batch in rows[torch.randperm(len(rows))].split(settings.batch_size):
            inputs = nn.functional.dropout((features[batch] - mean) / scale, settings.dropout) * scale + mean
            loss = cross_entropy(pivot_logits(inputs, {**_named(layers), **standard}), labels[batch], weight=weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            logits = pivot_logits(features[validation], {**_named(layers), **standard})
            held_loss = float(cross_entropy(logits, labels[validation], weight=weights))
        log.append([float(np.mean(losses)), held_loss])
        progress(epoch + 1, settings.num_epochs)
        since += 1
        if held_loss < best_loss:
            best, best_loss, since = copy.deepcopy(layers.state_dict()), held_loss, 0
        if since >= settings.patience:
            break
    return {**{name: tensor.detach().clone() for name, tensor in best.items()}, **standard}, log


def _named(layers: nn.ModuleDict) -> dict[str, Tensor]:
    return dict(layers.named_parameters())
