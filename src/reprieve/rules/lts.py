"""Local Tolerance Score of ARC-Decode (section 3.3): accept where a calibrated bound on the next step is small."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import require_choice, require_range
from reprieve.rules.base import Dial, Traits, register_rule
from reprieve.rules.learned import HeadRule
from reprieve.types import Evidence, Need

SMALLEST_PROB = 1e-10  # the paper clamps probabilities too, but gives no value


def raw_scores(evidence: Evidence, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the two bounds (Eq. 10 and 13): [...] each, 0 for the target's own choice.

    Args:
        scale: [D], one over each embedding coordinate's standard deviation: the diagonal of W.

    Returns:
        The squared whitened distance of the token's embedding to that of the target's most likely token, and the
        squared difference of their log-probabilities.
    """
    assert evidence.token_embeddings is not None and evidence.top_embeddings is not None
    difference = (evidence.token_embeddings.float() - evidence.top_embeddings.float()) * scale
    floor = math.log(SMALLEST_PROB)
    margin = evidence.target_log_probs.amax(-1).clamp_min(floor) - evidence.token_log_probs.clamp_min(floor)
    return difference.square().sum(-1), margin.square()


def lts_bound(
    distance: Tensor,  # [...], from `raw_scores`
    margin: Tensor,  # [...], from `raw_scores`
    *,
    embedding_factor: float | Tensor,  # c'
    logit_factor: float | Tensor,  # alpha * kappa
) -> Tensor:  # [...], nats
    """Return U, the bound on the Jensen-Shannon divergence of the next step (Eq. 14): the smaller of two bounds."""
    return torch.minimum(embedding_factor * distance, logit_factor * margin)


@register_rule
@dataclass(frozen=True)
class LtsRule(HeadRule):
    """Rescue a token when LTS = 1 - U / tau_delta is at least theta (ARC-Decode, Eq. 15).

    U bounds, at the confidence of the calibration, the change of the target's next-step distribution if the token
    replaces the target's most likely one. It is the smaller of two bounds: from the distance of the two tokens'
    embeddings, and from the difference of their log-probabilities. The embedding is the target's input embedding, tied
    to the output or not, because the bound concerns the step after the target reads the token.

    Relaxed: the bound concerns the next step, not the answer.

    Args:
        path: folder or hub id of a calibration (`reprieve train lts`).
        theta: smallest accepted score; the paper's experiments use 0.3. 0 accepts up to the tolerance itself, 1 only
            tokens as likely as the target's most likely one, infinity nothing.
        siblings: in a tree, `in_turn` (the paper) accepts the first child, in drafting order, that the lossless check
            or the score passes; `last` applies the score after the check has refused all children, which stays closer
            to the target. On chains both are equal.
    """

    name = "lts"
    own_dial = Dial("theta", strictest=math.inf, stops=(1.0, 0.99, 0.97, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.0))
    head_kind = "lts"
    made_by = "reprieve train lts"
    origin = 'ARC-Decode, "Risk-Bounded Acceptance for Sampling-Based Speculative Decoding"'

    theta: float = 0.3
    siblings: str = "in_turn"

    def __post_init__(self) -> None:
        require_range("theta", self.theta, -math.inf, math.inf)
        require_choice("siblings", self.siblings, ("in_turn", "last"))

    @property
    def traits(self) -> Traits:
        return Traits(needs=frozenset({Need.EMBEDDINGS}))

    @property
    def rescues_in_turn(self) -> bool:
        return self.siblings == "in_turn"

    @property
    def threshold(self) -> float:
        """Largest accepted U / tau_delta: 1 - theta."""
        return 1.0 - self.theta
