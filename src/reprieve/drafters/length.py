"""How many tokens a round drafts: as many as were asked for, as recent acceptance suggests, or as a head says.

What decides looks at the answer in hand only, and at no clock: the same request gives the same answer. A token once
drawn stays in the block, so that a decision which looked at it cannot bias what a lossless check commits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from reprieve.heads.length import LengthHead
from reprieve.settings import require_draft_tokens

_MEMORY = 0.8  # weight of the rounds before
_VERIFIED = 0.03  # what a further token costs a verification, in target forwards
_MOST, _MOST_EXACT = 16, 32
_PRIOR_RATE = 0.9  # of a block's first place, before anything is known
_PLACE_WEIGHT = 8.0  # judged tokens that the rate of the place before counts for
_ANSWERS_WEIGHT = 16.0  # judged tokens that the rate over earlier answers counts for
_BLOCK_MEMORY = 0.97


class RoundLength(Protocol):
    """Decides for the rounds of one answer."""

    reads_states: bool  # whether `goes_on` wants the draft's last hidden states
    trees: TreeLength | None  # decides about trees; None where they keep their shape

    def begin(self) -> int:
        """A round begins: the deepest block it may draft."""
        ...

    def goes_on(self, hidden: Tensor | None, logits: Tensor, token_id: Tensor) -> bool:
        """Whether to draft another token after this one.

        Args:
            hidden: the draft's state that predicted it, [1, D]; None where `reads_states` is false.
            logits: the draft's, that it was taken from, [1, V].
            token_id: [1].
        """
        ...

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """What became of a round's block, which may have been empty."""
        ...


class TreeLength:
    """Which levels and nodes of a tree pay, by the drafter's own probabilities and by how far they are borne out.

    A level pays where the chance that it is reached, and a node where the chance that it is accepted, is worth more
    than its time earns elsewhere: the tokens committed so far over the time they took, in target forwards.

    Args:
        cost: of drafting a level, in target forwards.
    """

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self._tokens, self._time = 3.0, 2.0  # as if one round had been seen, neither good nor bad
        self._expected, self._accepted = 2.0, 2.0
        self._levels, self._hoped = 1, 0.0

    def level_pays(self, reached: float) -> bool:
        """Whether to draft a level that is reached with this probability."""
        pays = self._borne_out * reached >= self._rate * self.cost
        self._levels += pays
        return pays

    def least(self) -> float:
        """The probability of its whole path below which a node is not worth its verification."""
        return min(0.5, self._rate * _VERIFIED / self._borne_out)

    def expect(self, num_accepted: float) -> None:
        """How many tokens of the tree would be accepted if the drafter were right about its chances."""
        self._hoped = num_accepted

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """See `RoundLength`; the next tree begins with one level."""
        if num_drafted:
            self._tokens = _MEMORY * self._tokens + num_accepted + 1
            self._time = _MEMORY * self._time + 1 + self.cost * self._levels + _VERIFIED * num_drafted
            self._expected = _MEMORY * self._expected + self._hoped
            self._accepted = _MEMORY * self._accepted + num_accepted
        self._levels, self._hoped = 1, 0.0

    @property
    def _rate(self) -> float:
        return self._tokens / self._time

    @property
    def _borne_out(self) -> float:
        return min(max(self._accepted / max(self._expected, 1e-6), 0.1), 2.0)


@runtime_checkable
class DraftLength(Protocol):
    """Makes a `RoundLength` for every answer."""

    reads_states: bool

    @property
    def most(self) -> int:
        """No round drafts deeper."""
        ...

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        """For an answer with this value of the rule's dial, at this temperature of the target."""
        ...


class FixedLength:
    """K tokens, always.

    Raises:
        SpecError: K is out of range.
    """

    reads_states = False
    trees: TreeLength | None = None

    def __init__(self, num_draft_tokens: int) -> None:
        require_draft_tokens(num_draft_tokens)
        self.most = num_draft_tokens

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        return self

    def begin(self) -> int:
        return self.most

    def goes_on(self, hidden: Tensor | None, logits: Tensor, token_id: Tensor) -> bool:
        return True

    def learn(self, num_drafted: int, num_accepted: int) -> None: ...


class AcceptanceRates:
    """How often each place of a block was accepted, given that all places before it were.

    Tokens are not accepted independently of each other: a block is mostly accepted whole or rejected early. So every
    place has a rate of its own. Where little was seen, the rate of the place before it counts.

    Args:
        num_places: of the longest block.
        memory: weight of what was seen before each new block, (0, 1].
    """

    def __init__(self, num_places: int, memory: float = 1.0) -> None:
        self._accepted = [0.0] * num_places
        self._judged = [0.0] * num_places
        self._memory = memory

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """See `RoundLength`."""
        if not num_drafted:
            return
        for place in range(len(self._judged)):
            judged = place < min(num_drafted, num_accepted + 1)
            self._judged[place] = self._memory * self._judged[place] + judged
            self._accepted[place] = self._memory * self._accepted[place] + (place < num_accepted)

    def rates(self, prior: Sequence[float] | None = None) -> list[float]:
        """Return the rate of each place.

        Args:
            prior: rates of other answers; None if there are none.
        """
        rates, before = [], _PRIOR_RATE
        for place, (accepted, judged) in enumerate(zip(self._accepted, self._judged, strict=True)):
            expected, weight = (before, _PLACE_WEIGHT) if prior is None else (prior[place], _ANSWERS_WEIGHT)
            before = (accepted + weight * expected) / (judged + weight)
            rates.append(before)
        return rates


def best_length(rates: Sequence[float], cost: float) -> int:
    """Return the K with most expected tokens for its time (Leviathan et al. 2023, Theorem 3.8, with a rate a place).

    Args:
        rates: chance of each place to be accepted if all before it are.
        cost: of drafting and verifying a token, in target forwards.
    """
    reached, expected, best, length = 1.0, 1.0, 0.0, 1
    for place, rate in enumerate(rates, start=1):
        reached *= rate
        expected += reached
        if (speed := expected / (1 + cost * place)) > best:
            best, length = speed, place
    return length


class AcceptanceLength:
    """The K that pays best if tokens go on being accepted as often as before.

    Args:
        cost: of a drafted token, or of a level of a tree, in target forwards.
        drafts_trees: whether blocks branch; their levels and nodes are then weighed one by one.
        exact: whether a greedy answer is the same for every K. K then comes from a rate a place, and an answer begins
            with the rates of earlier ones. Otherwise K follows from the answer itself, so that a request repeated
            gives the same answer, and from one rate for all places, as in the certificates that say `auto`.
    """

    reads_states = False

    def __init__(self, cost: float, drafts_trees: bool = False, *, exact: bool = False) -> None:
        self.cost = cost
        self.drafts_trees = drafts_trees
        self.most = _MOST_EXACT if exact and not drafts_trees else _MOST
        self._answers = AcceptanceRates(self.most) if exact else None

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        if self.drafts_trees:
            return _TreeAcceptance(TreeLength(self.cost), self.most)
        if self._answers is None or temperature:
            return _RecentAcceptance(self.cost + _VERIFIED)
        return _PlaceAcceptance(self.cost + _VERIFIED, self._answers, self.most)


class _Acceptance:
    reads_states = False
    trees: TreeLength | None = None

    def goes_on(self, hidden: Tensor | None, logits: Tensor, token_id: Tensor) -> bool:
        return True


class _TreeAcceptance(_Acceptance):
    def __init__(self, trees: TreeLength, most: int) -> None:
        self.trees = self._tree = trees
        self.most = most

    def begin(self) -> int:
        return self.most

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self._tree.learn(num_drafted, num_accepted)


class _RecentAcceptance(_Acceptance):
    def __init__(self, cost: float) -> None:
        self.cost = cost
        self._accepted, self._judged = 3.2, 4.0  # as if four tokens had been seen, most of them good

    def begin(self) -> int:
        return best_length([min(self._accepted / self._judged, 0.999)] * _MOST, self.cost)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            self._accepted = _MEMORY * self._accepted + num_accepted
            self._judged = _MEMORY * self._judged + min(num_drafted, num_accepted + 1)


class _PlaceAcceptance(_Acceptance):
    def __init__(self, cost: float, answers: AcceptanceRates, most: int) -> None:
        self.cost = cost
        self._answers, self._answer = answers, AcceptanceRates(most, _BLOCK_MEMORY)

    def begin(self) -> int:
        return best_length(self._answer.rates(self._answers.rates()), self.cost)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self._answer.learn(num_drafted, num_accepted)
        self._answers.learn(num_drafted, num_accepted)


@dataclass(frozen=True)
class LearnedLength:
    """A block ends where the chance that all of it and another token are accepted is below the head's price.

    That is where another token's expected gain falls below what its time earns elsewhere: the price is the tokens a
    second of the whole, times the seconds of one more drafted and verified token.
    """

    head: LengthHead
    reads_states = True

    @property
    def most(self) -> int:
        return self.head.most

    def start(self, dial: float | None, temperature: float) -> RoundLength:
        dial = 0.0 if dial is None else min(max(dial, self.head.lowest), self.head.highest)
        return _Learned(self.head, dial, temperature)


class _Learned:
    reads_states = True
    trees: TreeLength | None = None

    def __init__(self, head: LengthHead, dial: float, temperature: float) -> None:
        self._head = head
        self._weight = head.hidden_weight
        self._scalars = head.scalar_weight.tolist()
        self._features = [1.0, 0.0, 0.0, 0.0, dial, temperature]
        self.recent = Recent()

    def begin(self) -> int:
        self._place, self._chance = 0, 1.0
        return self._head.most

    def goes_on(self, hidden: Tensor | None, logits: Tensor, token_id: Tensor) -> bool:
        assert hidden is not None
        read = torch.cat([self._weight @ hidden[0].float(), token_log_prob(logits, token_id)])
        this, after, self._features[1] = read.tolist()
        self._features[2], self._features[3] = place_feature(self._place), self.recent.share
        self._place += 1
        self._chance *= _sigmoid(this + _product(self._scalars[0], self._features))
        return self._chance * _sigmoid(after + _product(self._scalars[1], self._features)) >= self._head.price

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self.recent.learn(num_drafted, num_accepted)


class Recent:
    """The share of an answer's lately judged tokens that were accepted; older rounds count less and less."""

    def __init__(self) -> None:
        self.share = 0.7

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """See `RoundLength`."""
        if num_drafted:
            self.share = _MEMORY * self.share + (1 - _MEMORY) * num_accepted / min(num_drafted, num_accepted + 1)


def token_log_prob(logits: Tensor, token_id: Tensor) -> Tensor:
    """The draft's log-probability [1] of a token [1] that was taken from its logits [1, V]."""
    return logits[0, token_id] - logits.logsumexp(-1)


def place_feature(place: int) -> float:
    """A token's place in its block, from 0, as a head reads it."""
    return min(place, 8) / 8


def _product(weights: list[float], values: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-min(max(value, -60.0), 60.0)))
