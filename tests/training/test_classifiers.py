"""Two heads learn which side of a mismatch ends better, on states that show it."""

import dataclasses

import numpy as np
import pytest
import torch

from reprieve.errors import SpecError
from reprieve.heads.features import TokenStates
from reprieve.training.classifiers import train_state_arbiter
from reprieve.training.features import LabelledTokens, folds_by_problem
from reprieve.training.settings import StateArbiterTraining
from tests.kit.tiny import IDENTITY

SIZE, NUM = 3, 600


def tokens(seed=0):
    """Tokens whose first target state shows that the draft is worse, and whose first draft state that it is better."""
    rng = np.random.default_rng(seed)
    states = torch.tensor(rng.normal(size=(2, NUM, SIZE)), dtype=torch.float32)
    gains = (states[1, :, 0] > 1.0).float() - (states[0, :, 0] > 0.5).float()
    scalars = [torch.tensor(rng.uniform(size=NUM), dtype=torch.float32) for _ in range(4)]
    return LabelledTokens(
        states=TokenStates({"draft": {-1: states[0]}}, {"draft": {-1: states[1]}}, *scalars),
        important=(gains < 0).numpy(),
        problem_ids=np.array([f"p{n % 40}" for n in range(NUM)]),
        gains=gains.numpy(),
    )


@pytest.mark.slow
def test_both_heads_learn_the_signal():
    given, settings = tokens(), StateArbiterTraining(grid=(1.0, 1e-4))
    head = train_state_arbiter(given, IDENTITY, "t", settings=settings)
    assert head.num_features == 2 * SIZE + 4 and head.reads_draft and head.threshold == 0.5
    assert head.training["worse"]["auc_held_out"][0] > 0.9 and head.training["better"]["auc_held_out"][0] > 0.9
    fresh = tokens(seed=1)
    risks = head.probability(torch.from_numpy(fresh.features(settings.recipe))).numpy()
    taken = risks <= head.threshold
    assert fresh.gains[taken].mean() > 0.1 > -0.2 > fresh.gains[~taken].mean()
    assert risks[fresh.gains > 0].mean() < 0.5 < risks[fresh.gains < 0].mean()


@pytest.mark.slow
def test_the_penalty_is_chosen_by_held_out_log_loss():
    """Most features are noise, so the weakest penalty is overconfident."""
    rng = np.random.default_rng(0)
    given = tokens()
    noise = torch.tensor(rng.normal(size=(NUM, 200)), dtype=torch.float32)
    states = dataclasses.replace(
        given.states, target={"draft": {-1: torch.cat([given.states.target["draft"][-1], noise], 1)}}
    )
    head = train_state_arbiter(
        dataclasses.replace(given, states=states), IDENTITY, "t", settings=StateArbiterTraining(grid=(1e3, 1e-2, 1e-7))
    )
    assert (head.training["worse"]["C"], head.training["better"]["C"]) == (1e-2, 1e-2)
    losses = [row["log_loss"] for row in head.training["better"]["grid"]]
    assert losses[1] < min(losses[0], losses[2]) and head.training["better"]["auc_held_out"][0] > 0.8


def test_folds_hold_whole_problems_and_each_has_cases():
    ids = np.array([f"p{n // 5}" for n in range(100)])
    labels = np.isin(np.arange(100), [0, 1, 20, 40, 60])
    folds = folds_by_problem(ids, labels, num_folds=5, seed=3)
    assert sorted(set(folds)) == [0, 1, 2, 3], "as many as problems with a case"
    assert all(len(set(folds[ids == one])) == 1 for one in set(ids))
    assert all(labels[folds == fold].any() for fold in range(4))


def test_other_tokens_that_all_fall_into_one_fold_are_refused():
    """Four labelled problems make four folds; the other tokens lie in two problems, which may share a fold."""
    ids = np.array(["p0", "p0", "p1", "p2", "p3", "p4"])
    labels = np.array([True, False, True, True, True, False])
    made = []
    for seed in range(20):
        try:
            made.append(len(set(folds_by_problem(ids, labels, num_folds=5, seed=seed)[~labels])))
        except SpecError as error:
            made.append(str(error))
    refused = "all other tokens, of 2 problems, fell into one fold; mine more, or change --seed"
    assert set(made) == {2, refused}


@pytest.mark.parametrize("held_out", [0.0, 0.6])
def test_held_out_shares_out_of_range_are_refused(held_out):
    with pytest.raises(SpecError, match=r"held_out must be in \(0, 0\.[59]\]"):
        StateArbiterTraining(held_out=held_out)


def test_labels_without_both_sides_are_refused():
    given = dataclasses.replace(tokens(), gains=np.full(NUM, np.nan))
    with pytest.raises(SpecError, match="mine arbitration, or pivot"):
        train_state_arbiter(given, IDENTITY, "t", settings=StateArbiterTraining())


@pytest.mark.slow
def test_a_draft_that_is_never_better_is_refused():
    given = dataclasses.replace(tokens(), gains=np.minimum(tokens().gains, 0))
    with pytest.raises(SpecError, match="at least 2 problems must hold labelled tokens, got 0"):
        train_state_arbiter(given, IDENTITY, "t", settings=StateArbiterTraining())
