"""Speculative cascades (Narasimhan et al., arXiv 2405.19261): defer to the target only where it is more confident."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_choice
from reprieve.rules.base import Dial, Rule, Traits, register_rule
from reprieve.rules.distributions import total_variation
from reprieve.types import Evidence, Need, gather_token


def cascade_tok_probs(
    target_probs: Tensor,  # [..., V]
    draft_probs: Tensor,  # [..., V]
    *,
    alpha: float | Tensor,  # or [...]
) -> Tensor:  # [..., V]
    """Return the distribution that Tok (version 3) samples from.

    Let A be the tokens with at least (1 - alpha) times the highest target probability. The result is draft(v) on A,
    plus the draft's mass outside A times target(v).
    """
    least = (1 - alpha) * target_probs.amax(-1)
    allowed = target_probs >= least.unsqueeze(-1)
    kept = draft_probs * allowed
    return kept + (1 - kept.sum(-1, keepdim=True)) * target_probs


@register_rule
@dataclass(frozen=True)
class CascadeRule(Rule):
    """Accept the draft where it is as confident as the target, within `alpha`.

    Args:
        kind: `opt` accepts where max draft >= max target - alpha * TV(target, draft); `diff` where max draft >= max
            target - alpha; `chow` where max draft >= 1 - alpha; otherwise they are strict. `tok` verifies against
            `cascade_tok_probs` (greedy: accepts tokens with at least 1 - alpha times the best target probability).
        alpha: larger is more lenient, -inf is lossless; 0 is not.

    Relaxed: the output follows the cascade's own distribution, not the target's.
    """

    name = "cascade"
    own_traits = Traits(needs=frozenset({Need.DRAFT_PROBS}))
    own_dial = Dial("alpha", strictest=-math.inf, stops=(-1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 0.8, 1.0))
    origin = "speculative cascades, Narasimhan et al. 2405.19261"

    kind: str = "opt"
    alpha: float = 0.0

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, ("opt", "tok", "diff", "chow"))
        if math.isnan(self.alpha):
            raise SpecError("alpha must be in [-inf, inf], got nan")

    @property
    def relaxes_target(self) -> bool:
        return self.kind == "tok"

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the smallest alpha that accepts the token, [...]."""
        draft_probs = evidence.draft_probs
        assert draft_probs is not None, "the engine refuses cascades without draft probabilities"
        best_target = evidence.target_probs.amax(-1)
        best_draft = draft_probs.amax(-1)
        if self.kind == "tok":
            risk = 1 - gather_token(evidence.target_probs, evidence.token_ids) / best_target
            # When sampling, `relaxed_target_probs` implements the cascade; there is nothing to rescue.
            return risk if evidence.greedy else torch.full_like(risk, math.inf)
        if self.kind == "chow":
            return 1 - best_draft
        if self.kind == "diff":
            return best_target - best_draft
        distance = total_variation(evidence.target_probs, draft_probs)
        # Equal distributions give 0 / 0: any alpha accepts.
        return torch.where(distance > 0, (best_target - best_draft) / distance, -torch.inf)

    def relaxed_target_probs(self, evidence: Evidence, *, threshold: float | Tensor | None = None) -> Tensor | None:
        if self.kind != "tok" or evidence.greedy:
            return None
        assert evidence.draft_probs is not None
        alpha = self.alpha if threshold is None else threshold
        return cascade_tok_probs(evidence.target_probs, evidence.draft_probs, alpha=alpha)
