"""CoSpec's rule, a trained arbitrator between the draft's and the target's token, and its variant on hidden states."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from reprieve.errors import require_range
from reprieve.rules.base import Dial, Traits, register_rule
from reprieve.rules.learned import HeadRule, LearnedRule
from reprieve.types import Need

_ROUNDING = 2.0**-23  # of float32 at 1


@register_rule
@dataclass(frozen=True)
class ArbiterRule(HeadRule):
    """Rescue a mismatch when pi(accept) exceeds lambda (CoSpec, Eq. 17 and appendix F).

    The arbiter was rewarded for right answers, not for imitating the target. It can choose the draft's token where the
    target's own would have failed. The rule is built on exact match (`lossless:verification=exact`): when sampling, the
    target's own draw is the other candidate, and a rejected mismatch commits it.

    Relaxed: the output is not the target's distribution, and the target's log-likelihoods do not describe it.

    Args:
        path: folder or hub id of an arbiter (`reprieve train arbiter`).
        lambda_: pi(accept) above which a mismatch is accepted, 0 to 1, written `lambda=`; 1 accepts none, and the
            paper uses 0.6. None uses the arbiter's own recommendation.
    """

    name = "arbiter"
    own_dial = Dial("lambda", strictest=1.0, stops=(1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0))
    own_traits = Traits(needs=frozenset({Need.ADVICE}), check="exact", beyond_truncation=True)
    head_kind = "arbiter"
    made_by = "reprieve train arbiter"
    origin = 'CoSpec, "Beyond the Target: From Imitation to Collaboration in Speculative Decoding"'

    lambda_: float | None = None

    def __post_init__(self) -> None:
        require_range("lambda", self.lambda_, 0.0, 1.0, optional=True)

    @property
    def traits(self) -> Traits:
        """Traits including the inputs of the arbiter."""
        if self.head is None:
            return self.own_traits
        return dataclasses.replace(self.own_traits, needs=self.own_traits.needs | self.head.needs)

    @property
    def threshold(self) -> float:
        """Largest accepted 1 - pi(accept): 1 - lambda. At lambda 0, risks that round to 1 pass too."""
        assert self.lambda_ is not None, "attach the rule's arbiter first (reprieve.heads.loading.attach_heads)"
        return 1.0 - self.lambda_ if self.lambda_ > 0 else 1.0 + _ROUNDING


@register_rule
@dataclass(frozen=True)
class StateArbiterRule(LearnedRule):
    """Rescue a mismatch where two linear heads predict no harm from the draft's token, or more benefit than harm.

    CoSpec's question (which side of a mismatch ends better?), answered from the states that verification computes, not
    by a separate network. The risk is (1 + P(worse) - P(better)) / 2: at `threshold` 0.5 a token passes if it improves
    the answer as often as it harms it.

    Relaxed: no bound on the output distribution.
    """

    name = "state_arbiter"
    own_dial: ClassVar[Dial | None] = Dial(
        "threshold", strictest=0.0, stops=(0.0, 0.4, 0.45, 0.48, 0.49, 0.5, 0.51, 0.52, 0.55, 0.6, 0.7, 0.8)
    )
    own_traits = Traits(needs=frozenset({Need.DRAFT_HIDDEN}), beyond_truncation=True)
    head_kind = "state_arbiter"
    made_by = "reprieve train state-arbiter"
    origin = "Reprieve; the question is CoSpec's"
