"""Lossless checks that keep the target's output distribution: greedy, speculative sampling, block verification.

Token-wise: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). Block verification: Sun et al.
(arXiv 2403.10444).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import require_choice
from reprieve.rules.base import About, Rule, Traits, register_rule
from reprieve.types import Evidence, gather_token


@register_rule
@dataclass(frozen=True)
class LosslessRule(Rule):
    """No relaxation: nothing is rescued.

    Args:
        verification: `token` decides token by token; `block` decides on the whole block jointly, which accepts at
            least as many tokens on average and needs a chain; `exact` accepts drafted tokens that equal the
            target's own draw, which accepts fewer (CoSpec's base, appendix F). Greedy decoding makes all three
            equal.
    """

    name = "lossless"
    about = About("Leviathan et al. 2211.17192; Chen et al. 2302.01318; block verification: Sun et al. 2403.10444")

    verification: str = "token"

    def __post_init__(self) -> None:
        require_choice("verification", self.verification, ("token", "block", "exact"))

    @property
    def traits(self) -> Traits:
        return Traits(check=self.verification)

    @property
    def threshold(self) -> float:
        return float("-inf")

    def risk(self, evidence: Evidence) -> Tensor:
        """Return +inf for every token, [...]."""
        return torch.full(evidence.token_ids.shape, float("inf"), device=evidence.token_ids.device)


def sampling_accepts(
    target_probs: Tensor,  # [..., V]
    proposal_probs: Tensor | None,  # [..., V]; None when the drafter did not sample
    token_ids: Tensor,  # [...], int64
    uniforms: Tensor,  # [...], in [0, 1)
) -> Tensor:  # [...], bool
    """Speculative sampling: accept with probability min(1, target / proposal)."""
    target = gather_token(target_probs, token_ids)
    proposal = torch.ones_like(target) if proposal_probs is None else gather_token(proposal_probs, token_ids)
    return uniforms * proposal < target


def residual_probs(
    target_probs: Tensor,  # [..., V]
    proposal_probs: Tensor | None,  # [..., V]; None when the drafter did not sample
    token_ids: Tensor,  # [...], int64: the rejected token
) -> Tensor:  # [..., V]
    """Return the distribution after a rejection: the positive part of target - proposal, normalised.

    If target and proposal are equal, only rounding can have caused the rejection; the target is returned.
    """
    if proposal_probs is None:
        residual = target_probs.scatter(-1, token_ids.unsqueeze(-1), 0.0)
    else:
        residual = (target_probs - proposal_probs).clamp_min(0)
    mass = residual.sum(-1, keepdim=True)
    return torch.where(mass > 0, residual / mass.clamp_min(torch.finfo(mass.dtype).tiny), target_probs)


def block_verification(
    target_probs: Tensor,  # [K, V], judging each drafted token
    proposal_probs: Tensor,  # [K, V]
    token_ids: Tensor,  # [K], int64
    uniforms: Tensor,  # [K], in [0, 1)
) -> tuple[Tensor, Tensor]:  # accepted tokens [], int64; residuals [K, V] to sample from after each shorter prefix
    """Joint verification of a chain (arXiv 2403.10444, Algorithm 2): the longest prefix that passes is kept.

    With p_0 = 1 and p_i = min(1, p_{i-1} target(x_i) / proposal(x_i)), prefix i passes with probability
    S_i / (S_i + 1 - p_i), S_i = sum of (p_i target - proposal)+ at the next position, and p_K for the whole block.
    """
    ratios = gather_token(target_probs, token_ids) / gather_token(proposal_probs, token_ids)
    joint = [torch.ones_like(ratios[0])]
    for ratio in ratios:
        joint.append((joint[-1] * ratio).clamp_max(1.0))
    joints = torch.stack(joint)  # [K + 1]
    residuals = (joints[:-1, None] * target_probs - proposal_probs).clamp_min(0)
    masses = residuals.sum(-1)  # [K], S_0 to S_{K-1}
    chances = torch.cat([masses[1:] / (masses[1:] + 1 - joints[1:-1]), joints[-1:]])  # of prefix 1 to K
    passed = uniforms < chances.nan_to_num(0.0)  # 0 / 0: the residual is empty, so the prefix cannot be the longest
    lengths = torch.arange(1, len(token_ids) + 1, device=token_ids.device)
    num_accepted = (lengths * passed).amax()
    normalised = residuals / masses.unsqueeze(-1).clamp_min(torch.finfo(masses.dtype).tiny)
    return num_accepted, torch.where(masses.unsqueeze(-1) > 0, normalised, target_probs)
