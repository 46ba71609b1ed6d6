"""Draft length policies: fixed, from recent acceptance, or predicted by a head.

Policies use measured times and earlier answers only if every K gives the same answer, up to rounding, so a repeated
request gives the same answer. A sampled token stays in the block, so a decision that depends on it cannot bias the
output of a lossless check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from reprieve.heads.length import LengthHead
from reprieve.models.cached_model import StepCosts
from reprieve.settings import require_draft_tokens

_MEMORY = 0.8  # weight of earlier rounds
_MOST, _MOST_TREE = 32, 16
_SMALLEST = 1e-9  # path probability
_PRIOR_RATE = 0.95  # prior acceptance rate of a block's first position
_POSITION_WEIGHT = 8.0  # weight of the previous position's rate, in judged tokens
_ANSWERS_WEIGHT = 16.0  # weight of the rate over earlier answers, in judged tokens
_BLOCK_MEMORY = 0.97


class RoundLength(Protocol):
    """Draft length decisions for the rounds of one answer."""

    def begin(self) -> int:
        """Start a round; return its maximum depth."""
        ...

    def should_continue(self, hidden: Tensor | None, logits: Tensor, token_id: Tensor) -> bool:
        """Return True if another token should be drafted after this one.

        Args:
            hidden: the draft's last hidden state that predicted it, [1, D]; given if the policy `reads_states`.
            logits: the draft's logits that it came from, [1, V].
            token_id: [1].
        """
        return True

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of a round's block, which may be empty."""
        ...


class TreeLength(RoundLength):
    """Selects the levels and nodes of a tree, from the drafter's probabilities and their recent accuracy.

    A level is drafted if its probability of being reached is at least its cost in target forwards times the committed
    tokens per target forward so far. A node is verified if its probability of acceptance meets the same test.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._tokens, self._time = 3.0, 2.0  # prior of one average round
        self._total_expected, self._total_accepted = 2.0, 2.0
        self._levels, self._expected = 1, 0.0

    def begin(self) -> int:
        return _MOST_TREE

    def level_pays(self, reached: float) -> bool:
        """Return True if a level with this probability of being reached is worth drafting."""
        pays = self._calibration * reached >= self._rate * self.costs.draft
        self._levels += pays
        return pays

    def least(self) -> float:
        """Return the smallest path probability at which a node is worth verifying."""
        # Never 0: its logarithm is taken, and a measured cost can be 0.
        return min(0.5, max(_SMALLEST, self._rate * self.costs.verify / self._calibration))

    def expect(self, num_accepted: float) -> None:
        """Record the number of accepted tokens that the drafter's probabilities predict for the tree."""
        self._expected = num_accepted

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Update the speed and acceptance estimates, and reset the levels of the tree."""
        if num_drafted:
            self._tokens = _MEMORY * self._tokens + num_accepted + 1
            spent = 1 + self.costs.draft * self._levels + self.costs.verify * num_drafted
            self._time = _MEMORY * self._time + spent
            self._total_expected = _MEMORY * self._total_expected + self._expected
            self._total_accepted = _MEMORY * self._total_accepted + num_accepted
        self._levels, self._expected = 1, 0.0

    @property
    def _rate(self) -> float:
        return self._tokens / self._time

    @property
    def _calibration(self) -> float:
        return min(max(self._total_accepted / max(self._total_expected, 1e-6), 0.1), 2.0)


@runtime_checkable
class DraftLength(Protocol):
    """Factory of a `RoundLength` for every answer."""

    reads_states: bool = False  # True if its rounds read the draft's last hidden states
    most: int  # largest depth of any round

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        """Return the policy for an answer with this dial value and target temperature."""
        ...


class FixedLength(DraftLength, RoundLength):
    """Constant length K.

    Raises:
        SpecError: K is out of range.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        require_draft_tokens(num_draft_tokens)
        self.most = num_draft_tokens

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        return self

    def begin(self) -> int:
        return self.most

    def update(self, num_drafted: int, num_accepted: int) -> None: ...


class AcceptanceRates:
    """Acceptance rate of each position of a block, given that all earlier positions were accepted.

    Acceptances are not independent: a block is mostly accepted whole or rejected early. Each position therefore has its
    own rate. With few observations, it stays close to the rate in other answers, or else to the previous position's.

    Args:
        num_positions: of the longest block.
        memory: decay factor of earlier observations at each new block, (0, 1]; 1 keeps all.
    """

    def __init__(self, num_positions: int, memory: float = 1.0) -> None:
        self._accepted = [0.0] * num_positions
        self._judged = [0.0] * num_positions
        self._memory = memory

    def update(self, num_drafted: int, num_accepted: int) -> None:
        if not num_drafted:
            return
        for position in range(len(self._judged)):
            judged = position < min(num_drafted, num_accepted + 1)
            self._judged[position] = self._memory * self._judged[position] + judged
            self._accepted[position] = self._memory * self._accepted[position] + (position < num_accepted)

    def rates(self, prior: Sequence[float] | None = None) -> list[float]:
        """Return the rate of each position.

        Args:
            prior: rates of other answers; None if there are none.
        """
        rates, before = [], _PRIOR_RATE
        for position, (accepted, judged) in enumerate(zip(self._accepted, self._judged, strict=True)):
            expected, weight = (before, _POSITION_WEIGHT) if prior is None else (prior[position], _ANSWERS_WEIGHT)
            before = (accepted + weight * expected) / (judged + weight)
            rates.append(before)
        return rates


def best_length(rates: Sequence[float], cost: float) -> int:
    """Return the K with the most expected tokens per unit of time (Leviathan et al. 2023, Theorem 3.8).

    Args:
        rates: probability that each position is accepted, given that all earlier ones are.
        cost: of drafting and verifying a token, in target forwards.
    """
    reached, expected, best, length = 1.0, 1.0, 0.0, 1
    for num_drafted, rate in enumerate(rates, start=1):
        reached *= rate
        expected += reached
        if (speed := expected / (1 + cost * num_drafted)) > best:
            best, length = speed, num_drafted
    return length


class AcceptanceLength(DraftLength):
    """Draft length policy that maximises the expected speed, given the acceptance observed so far.

    Args:
        costs: estimated from the models' sizes.
        drafts_trees: True if blocks can branch; levels and nodes are then selected one by one (`TreeLength`).
        measure: returns measured costs; None unless a greedy answer is the same for every K, up to rounding. Greedy
            answers then use them, and start from the acceptance rates of earlier answers. Otherwise K depends on the
            current answer alone, so that a repeated request gives the same answer.
    """

    def __init__(
        self, costs: StepCosts, drafts_trees: bool = False, *, measure: Callable[[], StepCosts] | None = None
    ) -> None:
        self.costs = costs
        self.drafts_trees = drafts_trees
        self.most = _MOST_TREE if drafts_trees else _MOST
        self._measure = measure
        self._answers = AcceptanceRates(self.most)

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        costs, answers = self.costs, None
        if self._measure is not None and not temperature:
            costs, answers = self._measure(), self._answers
        if self.drafts_trees:
            return TreeLength(costs)
        return _ChainLength(costs.draft + costs.verify, self.most, answers)


class _ChainLength(RoundLength):
    def __init__(self, cost: float, most: int, answers: AcceptanceRates | None) -> None:
        self.cost = cost
        self._answers, self._answer = answers, AcceptanceRates(most, _BLOCK_MEMORY)

    def begin(self) -> int:
        return best_length(self._answer.rates(self._answers.rates() if self._answers is not None else None), self.cost)

    def update(self, num_drafted: int, num_accepted: int) -> None:
        self._answer.update(num_drafted, num_accepted)
        if self._answers is not None:
            self._answers.update(num_drafted, num_accepted)


class LearnedLength(DraftLength):
    """Ends a block when the probability that all of it and one more token are accepted falls below the head's price.

    Below the price, another token gains less than the same time gains on average: the price is the overall tokens per
    second times the seconds needed to draft and verify one more token.
    """

    reads_states = True

    def __init__(self, head: LengthHead) -> None:
        self.head = head
        self.most = head.most

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        dial = 0.0 if dial is None else min(max(dial, self.head.lowest), self.head.highest)
        return _LearnedRounds(self.head, dial, temperature)


class _LearnedRounds(RoundLength):
    def __init__(self, head: LengthHead, dial: float, temperature: float) -> None:
        self._head = head
        self._weight = head.hidden_weight
        self._scalars = head.scalar_weight.tolist()
        self._features = [1.0, 0.0, 0.0, 0.0, dial, temperature]
        self.recent = RecentAcceptance()

    def begin(self) -> int:
        self._place, self._chance = 0, 1.0
        return self._head.most

    def should_continue(self, hidden: Tensor | None, logits: Tensor, token_id: Tensor) -> bool:
        assert hidden is not None
        read = torch.cat([self._weight @ hidden[0].float(), token_log_prob(logits, token_id)])
        this, after, self._features[1] = read.tolist()
        self._features[2], self._features[3] = position_feature(self._place), self.recent.share
        self._place += 1
        self._chance *= _sigmoid(this + _product(self._scalars[0], self._features))
        return self._chance * _sigmoid(after + _product(self._scalars[1], self._features)) >= self._head.price

    def update(self, num_drafted: int, num_accepted: int) -> None:
        self.recent.update(num_drafted, num_accepted)


class RecentAcceptance:
    """Recent share of accepted tokens in an answer, with exponentially decaying weights."""

    def __init__(self) -> None:
        self.share = 0.7

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of a round."""
        if num_drafted:
            self.share = _MEMORY * self.share + (1 - _MEMORY) * num_accepted / min(num_drafted, num_accepted + 1)


def token_log_prob(logits: Tensor, token_id: Tensor) -> Tensor:
    """Return the draft's log-probability [1] of a token [1], from its logits [1, V]."""
    return logits[0, token_id] - logits.logsumexp(-1)


def position_feature(position: int) -> float:
    """Return a token's position in its block, from 0, scaled as a head reads it."""
    return min(position, 8) / 8


def _product(weights: list[float], values: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-min(max(value, -60.0), 60.0)))
