"""CoSpec's formulas (section 3.4), by hand."""

import dataclasses
import math

import pytest
import torch

from recipes.arbiter.rewards import (
    Decision,
    Rewards,
    Rollout,
    RolloutRound,
    clipped_objective,
    policy_divergence,
    policy_entropy,
)
from reprieve.errors import SpecError
from reprieve.models.arbiter import ArbitrationRound


def round_of(*decisions, k=4):
    return RolloutRound(ArbitrationRound(8, [1] * k, [2] * k), tuple(decisions))


ACCEPTED_2 = Decision(2, True, target_log_prob=-2.0)


REJECTED_4 = Decision(4, False, target_log_prob=-5.0)


def rollout(*rounds, correct):
    return Rollout((1, 2, 3), tuple(rounds), correct)


@pytest.mark.parametrize(
    ("decisions", "emitted", "credit"),
    [
        ([ACCEPTED_2, REJECTED_4], 4, 2 / 3),  # (4 - 2) / (5 - 2)
        ([ACCEPTED_2], 5, 1.0),  # no rejection: K + 1
        ([Decision(2, False)], 2, 0.0),  # rejected at once
        ([Decision(4, True)], 5, 1.0),
        ([Decision(1, True), Decision(3, True), Decision(4, False)], 4, 3 / 4),
    ],
)
def test_length_credit_by_hand(decisions, emitted, credit):
    """Eq. 15, 19 and 20 at K = 4."""
    taken = round_of(*decisions)
    assert taken.num_emitted == emitted
    assert taken.length_credit == pytest.approx(credit)


def test_decision_rewards_and_returns_by_hand():
    """Eq. 20, 24 and 25: right rollouts get rho at each decision, failed ones pay surprisal and rejections."""
    rewards = Rewards()
    right = rollout(round_of(ACCEPTED_2, REJECTED_4), round_of(ACCEPTED_2), correct=True)
    assert rewards.decision_rewards(right) == [[pytest.approx(2 / 3)] * 2, [1.0]]
    assert rewards.rollout_return(right) == pytest.approx(2 / 3 + 2 / 3 + 1)
    failed = dataclasses.replace(right, correct=False)
    assert rewards.decision_rewards(failed) == [[-2.0, -0.25], [-2.0]]
    assert rewards.rollout_return(failed) == pytest.approx(-4.25)
    assert Rewards(risk=0.0).rollout_return(failed) == pytest.approx(-0.25)
    assert Rewards(rejection=0.0).rollout_return(failed) == pytest.approx(-4.0)
    assert Rewards(length=False).rollout_return(right) == 1.0
    assert Rewards(shaped=False).rollout_return(failed) == -1.0


def scored(value, *, correct):
    """A rollout whose return is `value`: that many accepted rounds, or enough rejections at 0.25 each."""
    if correct:
        return rollout(*[round_of(Decision(1, True))] * value, correct=True)
    return rollout(*[round_of(Decision(1, False))] * int(-value / 0.25), correct=False)


def test_group_advantages_by_hand():
    rewards = Rewards()
    alike = [scored(1, correct=True), scored(3, correct=True)]
    assert rewards.group_advantages(alike) == pytest.approx([-1.0, 1.0], rel=1e-5)
    failed = [scored(-1, correct=False), scored(-3, correct=False)]
    assert rewards.group_advantages(failed) == pytest.approx([0.5, -0.5], rel=1e-5), "eta_fail = 0.5 (Eq. 26)"
    mixed = [scored(2, correct=True), scored(1, correct=True), scored(-1, correct=False)]
    # gamma = 1 / 3 (Eq. 27); the rescaled returns 2/3, 1/3, -1 have mean 0 and variance 14/27
    deviation = math.sqrt(14 / 27)
    wanted = [2 / 3 / deviation, 1 / 3 / deviation, -1 / deviation]
    assert rewards.group_advantages(mixed) == pytest.approx(wanted, rel=1e-4)
    # without rescaling: 2, 1, -1 with mean 2/3 and variance 14/9
    plain = [(value - 2 / 3) / math.sqrt(14 / 9) for value in (2, 1, -1)]
    assert Rewards(rebalance=False).group_advantages(mixed) == pytest.approx(plain, rel=1e-4)
    assert rewards.group_advantages([scored(1, correct=True)] * 3) == [0.0, 0.0, 0.0]
    with pytest.raises(SpecError, match="at least one rollout"):
        rewards.group_advantages([])


def test_credit_of_decisions_by_hand():
    rewards = Rewards()
    right = rollout(round_of(ACCEPTED_2, REJECTED_4), round_of(Decision(2, False)), correct=True)
    assert rewards.decision_advantages(right, 1.5) == [[pytest.approx(1.0)] * 2, [0.0]], "rho times the advantage"
    assert Rewards(share_credit=True).decision_advantages(right, 1.5) == [[pytest.approx(0.75)] * 2, [0.0]]
    failed = dataclasses.replace(right, correct=False)
    shares = rewards.decision_advantages(failed, -3.0)  # |g| = 2, 0.25 and 0.25 of 2.5
    assert shares == [[pytest.approx(-2.4), pytest.approx(-0.3)], [pytest.approx(-0.3)]]
    assert Rewards(risk=0.0, rejection=0.0).decision_advantages(failed, -3.0) == [[0.0, 0.0], [0.0]]


def test_clipped_objective_by_hand():
    """The policy accepts with 0.5 and did with 0.4: the ratio is 1.25 for an accepted token, 5/6 for a rejected one."""
    logits, old = torch.zeros(4), torch.full((4,), 0.4)
    accepted, advantages = torch.tensor([True, True, False, False]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = clipped_objective(logits, accepted, old, advantages)
    assert found.tolist() == pytest.approx([1.2, -1.25, 5 / 6, -5 / 6], rel=1e-5)
    assert clipped_objective(logits, accepted, old, advantages, clip=0.1)[3].item() == pytest.approx(-0.9)


def test_entropy_and_divergence_by_hand():
    zero, three_to_one = torch.zeros(1), torch.tensor([math.log(3.0)])
    assert policy_entropy(zero).item() == pytest.approx(math.log(2))
    assert policy_entropy(three_to_one).item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert policy_divergence(zero, three_to_one).item() == pytest.approx(
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    )
    assert policy_divergence(zero, zero).item() == 0.0


def test_gradient_ascent_raises_rewarded_and_lowers_punished_actions():
    """Signs: gradient ascent accepts more where accepting was rewarded, and less where it was punished."""
    logits = torch.zeros(4, requires_grad=True)
    accepted, advantages = torch.tensor([True, True, False, False]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    (-clipped_objective(logits, accepted, torch.full((4,), 0.5), advantages).sum()).backward()
    assert (-logits.grad).sign().tolist() == [1.0, -1.0, -1.0, 1.0]
