"""CoSpec's rule: a learned arbitrator chooses between the draft's and the target's token at every mismatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from reprieve.errors import require_range
from reprieve.rules.learned import HeadRule

_ROUNDING = 2.0**-23  # of float32 at 1
BUNDLED_ARBITER = "reprieve/arithmetic-arbiter"


@dataclass(frozen=True)
class ArbiterRule(HeadRule):
    """Rescue a mismatch when pi(accept) exceeds lambda (CoSpec, Eq. 17 and appendix F).

    The one rule that does not ask whether the token imitates the target: the arbiter was rewarded for right answers,
    and can choose the draft's token where the target's own would have failed. Under it lies exact match (`lossless:
    verification=exact`): when sampling, the target's own draw in every place is the other candidate, and a rejected
    mismatch commits it. The output is not the target's distribution; log-likelihoods of the target do not describe it.

    Args:
        path: folder or hub id of an arbiter (`reprieve train arbiter`); the bundled pair's by default.
        lambda_: pi(accept) above which a mismatch is accepted, 0 to 1, written `lambda=`; 1 accepts none, and the
            paper uses 0.6. None takes the arbiter's own recommendation.
    """

    name = "arbiter"
    dial = "lambda"
    strictest = 1.0
    head_kind = "arbiter"
    made_by = "reprieve train arbiter"
    needs = frozenset({"advice"})
    base = "exact"
    beyond_truncation = True
    reads_block = True

    path: str = BUNDLED_ARBITER
    lambda_: float | None = None

    def __post_init__(self) -> None:
        if self.lambda_ is not None:
            require_range("lambda", self.lambda_, 0.0, 1.0)

    @classmethod
    def of(cls, arbiter: Any, *, lambda_: float | None = None) -> Self:
        """The rule of an arbiter in memory; its own lambda when None."""
        return cls(path="", lambda_=lambda_)._with_head(arbiter)

    def _with_head(self, head: Any) -> Self:
        rule = super()._with_head(head)
        return rule if self.lambda_ is not None else rule.with_parameter("lambda", head.threshold)

    @property
    def threshold(self) -> float:
        """What 1 - pi(accept) must stay below: 1 - lambda; at 0 even what rounds to pi = 0 passes."""
        assert self.lambda_ is not None, "attach the rule's arbiter first (reprieve.heads.loading.attach_heads)"
        return 1.0 - self.lambda_ if self.lambda_ > 0 else 1.0 + _ROUNDING
