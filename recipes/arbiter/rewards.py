"""CoSpec's reinforcement learning, formula by formula (section 3.4): pure numbers and tensors, no model.

Signs follow the paper's prose, and positions in a block count from 1 as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recipes.arbiter.settings import RewardSettings
from reprieve.errors import SpecError
from reprieve.models.arbiter import ArbitrationRound

_EPSILON = 1e-6


@dataclass(frozen=True)
class Decision:
    """One effective decision of a round: a mismatch up to the first rejection (Eq. 18).

    Args:
        position: of the drafted token in its block, 1 to K.
        accepted: the action taken.
        target_log_prob: of the drafted token under the target, nats (Eq. 23).
        old_prob: pi(accept) of the policy that decided.
    """

    position: int
    accepted: bool
    target_log_prob: float = 0.0
    old_prob: float = 0.5


@dataclass(frozen=True)
class RolloutRound:
    """One round of a rollout with at least one effective decision."""

    arbitration: ArbitrationRound
    decisions: tuple[Decision, ...]

    @cached_property
    def num_emitted(self) -> int:
        """s: the position of the first rejected mismatch, K + 1 without one (Eq. 15)."""
        rejected = (decision.position for decision in self.decisions if not decision.accepted)
        return next(rejected, len(self.arbitration.draft_ids) + 1)

    @cached_property
    def length_credit(self) -> float:
        """rho: the share of the positions after the first mismatch that the round emitted (Eq. 19 and 20)."""
        first = self.decisions[0].position
        return (self.num_emitted - first) / (len(self.arbitration.draft_ids) + 1 - first)


@dataclass(frozen=True)
class Rollout:
    """One answer decoded with sampled decisions."""

    context_ids: tuple[int, ...]  # prompt and answer
    rounds: tuple[RolloutRound, ...]
    correct: bool

    @property
    def num_decisions(self) -> int:
        return sum(len(taken.decisions) for taken in self.rounds)


@dataclass(frozen=True)
class Rewards(RewardSettings):
    """Rewards and advantages of rollouts and their decisions."""

    def decision_rewards(self, rollout: Rollout) -> list[list[float]]:
        """Return g of each decision, one list per round (Eq. 20 for right rollouts, Eq. 24 for failed ones)."""
        return [[self._reward(rollout, taken, decision) for decision in taken.decisions] for taken in rollout.rounds]

    def _reward(self, rollout: Rollout, taken: RolloutRound, decision: Decision) -> float:
        if rollout.correct:
            return taken.length_credit if self.length else 1.0
        if not self.shaped:
            return -1.0
        return -self.risk * abs(decision.target_log_prob) if decision.accepted else -self.rejection

    def rollout_return(self, rollout: Rollout) -> float:
        """Return J: the sum of the decisions' rewards (Eq. 25), or 1 or -1 where only correctness counts."""
        if rollout.correct and not self.length:
            return 1.0
        if not rollout.correct and not self.shaped:
            return -1.0
        return math.fsum(reward for rewards in self.decision_rewards(rollout) for reward in rewards)

    def group_advantages(self, group: Sequence[Rollout]) -> list[float]:
        """Return each rollout's advantage over the others of its prompt (Eq. 26 and 27).

        Raises:
            SpecError: an empty group.
        """
        if not group:
            raise SpecError("a group must hold at least one rollout, got none")
        returns = [self.rollout_return(rollout) for rollout in group]
        right = [rollout.correct for rollout in group]
        weight = 1.0 if any(right) else self.fail_weight
        if self.rebalance and any(right) and not all(right):
            gained = math.fsum(value for value, good in zip(returns, right, strict=True) if good)
            lost = math.fsum(abs(value) for value, good in zip(returns, right, strict=True) if not good)
            gamma = lost / (gained + _EPSILON)
            returns = [gamma * value if good else value for value, good in zip(returns, right, strict=True)]
        mean = math.fsum(returns) / len(returns)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in returns) / len(returns))
        return [weight * (value - mean) / (deviation + _EPSILON) for value in returns]

    def decision_advantages(self, rollout: Rollout, advantage: float) -> list[list[float]]:
        """Divide the rollout's advantage among its decisions, one list per round (after Eq. 27).

        Right rollouts credit each decision by its round's rho, failed ones by its share of the harm.
        """
        rewards = self.decision_rewards(rollout)
        if rollout.correct and not self.share_credit:
            return [[reward * advantage for reward in round_rewards] for round_rewards in rewards]
        total = math.fsum(abs(reward) for round_rewards in rewards for reward in round_rewards)
        return [
            [abs(reward) / total * advantage if total > 0 else 0.0 for reward in round_rewards]
            for round_rewards in rewards
        ]


def clipped_objective(
    logits: Tensor,  # [n], of accepting
    accepted: Tensor,  # [n], bool: the actions taken
    old_probs: Tensor,  # [n], pi(accept) when they were taken
    advantages: Tensor,  # [n]
    *,
    clip: float = 0.2,
) -> Tensor:  # [n], to be maximised
    """The first term of Eq. 28: min(r A, clip(r, 1 - eps, 1 + eps) A), r the ratio of probabilities of the action."""
    old = torch.where(accepted, old_probs, 1.0 - old_probs).clamp_min(1e-8).log()
    ratio = (_action_log_prob(logits, accepted) - old).exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)


def policy_entropy(logits: Tensor) -> Tensor:
    """H(pi) of each decision, nats: [n] to [n]."""
    probs = logits.sigmoid()
    return -(probs * logsigmoid(logits) + (1.0 - probs) * logsigmoid(-logits))


def policy_divergence(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL(pi || pi_ref) of each decision, nats: [n], [n] to [n]."""
    probs = logits.sigmoid()
    accept = logsigmoid(logits) - logsigmoid(reference_logits)
    reject = logsigmoid(-logits) - logsigmoid(-reference_logits)
    return probs * accept + (1.0 - probs) * reject


def _action_log_prob(logits: Tensor, accepted: Tensor) -> Tensor:
    return torch.where(accepted, logsigmoid(logits), logsigmoid(-logits))
