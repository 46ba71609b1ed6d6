"""The state arbiter from labels that say what both sides of a mismatch are worth: two fits of AutoJudge's kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from reprieve.errors import SpecError
from reprieve.heads.binding import PairIdentity
from reprieve.heads.state_arbiter import NEUTRAL, StateArbiter
from reprieve.loop import Progress, train
from reprieve.training.features import LabelledTokens
from reprieve.training.judge import JudgeLearner
from reprieve.training.settings import StateArbiterTraining
from reprieve.training.splits import auc_interval

_MARGIN = 0.01  # above neutral: where both are unlikely, a token is worth taking for its speed


def train_state_arbiter(
    tokens: LabelledTokens,
    pair: PairIdentity,
    task: str,
    *,
    settings: StateArbiterTraining | None = None,
    folder: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> StateArbiter:
    """Both heads, each with the C that ranks held-out problems best; the recommended threshold is fixed, 0.51.

    Args:
        folder: for checkpoints, from which a training that was cut off goes on; None keeps none.

    Raises:
        SpecError: labels that do not say what both sides are worth, or of one kind only.
        ReprieveError: a checkpoint of another recipe.
    """
    settings = settings or StateArbiterTraining()
    if np.isnan(tokens.gains).any():
        raise SpecError("labels must say what both sides of a mismatch are worth: mine arbitration, or pivot")
    fits, summary = [], {}
    for name, labels in (("worse", tokens.gains < 0), ("better", tokens.gains > 0)):
        learner = JudgeLearner(dataclasses.replace(tokens, important=labels), settings)
        train(learner, None if folder is None else folder / name, progress=progress)
        chosen, held = learner.fits[learner.best], learner.held
        fits.append(chosen)
        scores = chosen.scores(learner.features[held])
        summary[name] = {
            "num": int(labels.sum()),
            "auc_held_out": auc_interval(labels[held], scores, tokens.problem_ids[held]),
            "C": settings.grid[learner.best],
        }
    weights, biases = zip(*(fit.folded() for fit in fits), strict=True)
    threshold = NEUTRAL + _MARGIN
    return StateArbiter(
        tensors={"weight": torch.stack(weights), "bias": torch.stack(biases)},
        recipe=settings.recipe,
        pair=pair,
        task=task,
        threshold=threshold,
        training={
            "num_problems": len(np.unique(tokens.problem_ids)),
            "num_tokens": len(tokens.gains),
            "held_out": settings.held_out,
            "seed": settings.seed,
            **summary,
        },
    )
