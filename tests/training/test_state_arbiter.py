"""Two heads find which side of a mismatch ends better, where states say so."""

import dataclasses

import numpy as np
import pytest
import torch

from reprieve.errors import SpecError
from reprieve.heads.features import TokenStates
from reprieve.training.features import LabelledTokens
from reprieve.training.settings import StateArbiterTraining
from reprieve.training.state_arbiter import train_state_arbiter
from tests.kit.tiny import IDENTITY

SIZE, NUM = 3, 600


def tokens(seed=0):
    """The first target state says whether the draft is worse, the first draft state whether it is better."""
    rng = np.random.default_rng(seed)
    states = torch.tensor(rng.normal(size=(2, NUM, SIZE)), dtype=torch.float32)
    gains = (states[1, :, 0] > 1.0).float() - (states[0, :, 0] > 0.5).float()
    scalars = [torch.tensor(rng.uniform(size=NUM), dtype=torch.float32) for _ in range(4)]
    return LabelledTokens(
        states=TokenStates({"draft": {-1: states[0]}}, {"draft": {-1: states[1]}}, *scalars),
        important=(gains < 0).numpy(),
        problem_ids=np.array([f"p{n % 40}" for n in range(NUM)]),
        target_log_probs=np.zeros(NUM),
        draft_probs=np.zeros(NUM),
        gains=gains.numpy(),
    )


def test_both_heads_find_what_is_there():
    given, settings = tokens(), StateArbiterTraining(grid=(1.0, 1e-4))
    head = train_state_arbiter(given, IDENTITY, "t", settings=settings)
    assert head.num_features == 2 * SIZE + 4 and head.reads_draft and head.threshold == 0.51
    assert head.training["worse"]["auc_held_out"][0] > 0.9 and head.training["better"]["auc_held_out"][0] > 0.9
    fresh = tokens(seed=1)
    risks = head.probability(torch.from_numpy(fresh.features(settings.recipe))).numpy()
    taken = risks <= head.threshold
    assert fresh.gains[taken].mean() > 0.1 > -0.2 > fresh.gains[~taken].mean()
    assert risks[fresh.gains > 0].mean() < 0.5 < risks[fresh.gains < 0].mean()


def test_labels_without_both_sides_are_refused():
    given = dataclasses.replace(tokens(), gains=np.full(NUM, np.nan))
    with pytest.raises(SpecError, match="mine arbitration, or pivot"):
        train_state_arbiter(given, IDENTITY, "t")


def test_a_draft_that_is_never_better_is_refused():
    given = tokens()
    with pytest.raises(SpecError, match="important and unimportant"):
        train_state_arbiter(dataclasses.replace(given, gains=np.minimum(given.gains, 0)), IDENTITY, "t")
