"""CoSpec's rule: a learned arbitrator chooses between the draft's and the target's token at every mismatch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from reprieve.errors import require_range
from reprieve.needs import Need
from reprieve.rules.base import About, Dial, Traits, register_rule
from reprieve.rules.learned import HeadRule

_ROUNDING = 2.0**-23  # of float32 at 1


@register_rule
@dataclass(frozen=True)
class ArbiterRule(HeadRule):
    """Rescue a mismatch when pi(accept) exceeds lambda (CoSpec, Eq. 17 and appendix F).

    The one rule that does not ask whether the token imitates the target: the arbiter was rewarded for right answers,
    and can choose the draft's token where the target's own would have failed. Under it lies exact match (`lossless:
    verification=exact`): when sampling, the target's own draw in every place is the other candidate, and a rejected
    mismatch commits it. The output is not the target's distribution; log-likelihoods of the target do not describe it.

    Args:
        path: folder or hub id of an arbiter (`reprieve train arbiter`).
        lambda_: pi(accept) above which a mismatch is accepted, 0 to 1, written `lambda=`; 1 accepts none, and the
            paper uses 0.6. None takes the arbiter's own recommendation.
    """

    name = "arbiter"
    own_dial = Dial("lambda", strictest=1.0, stops=(1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0))
    own_traits = Traits(needs=frozenset({Need.ADVICE}), check="exact", beyond_truncation=True, reads_block=True)
    head_kind = "arbiter"
    made_by = "reprieve train arbiter"
    about = About(
        'CoSpec, "Beyond the Target: From Imitation to Collaboration in Speculative Decoding"',
        study=("arbiter:lambda=0.5", "arbiter:lambda=0.6"),
    )

    lambda_: float | None = None

    def __post_init__(self) -> None:
        if self.lambda_ is not None:
            require_range("lambda", self.lambda_, 0.0, 1.0)

    def holding(self, head: Any) -> Self:
        """The rule with an arbiter in memory, at its own lambda where the rule has none."""
        rule = super().holding(head)
        return rule if self.lambda_ is not None else rule.with_parameter("lambda", head.threshold)

    @property
    def traits(self) -> Traits:
        """With what its arbiter reads beside the round's tokens."""
        if self.head is None:
            return self.own_traits
        return dataclasses.replace(self.own_traits, needs=self.own_traits.needs | self.head.needs)

    @property
    def threshold(self) -> float:
        """What 1 - pi(accept) must stay below: 1 - lambda; at 0 even what rounds to pi = 0 passes."""
        assert self.lambda_ is not None, "attach the rule's arbiter first (reprieve.heads.loading.attach_heads)"
        return 1.0 - self.lambda_ if self.lambda_ > 0 else 1.0 + _ROUNDING
