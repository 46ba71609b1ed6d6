"""The checks that keep the target's output distribution: greedy matching, speculative sampling, block verification.

Token-wise: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). Block verification: Sun et al.
(arXiv 2403.10444). Both leave the distribution of the output exactly the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import require_choice
from reprieve.rules.base import Rule
from reprieve.types import Evidence, gather_token


@dataclass(frozen=True)
class LosslessRule(Rule):
    """No relaxation: nothing is rescued.

    Args:
        verification: `token` decides token by token; `block` decides on the whole block jointly, which accepts at
            least as many tokens on average and needs a chain; `exact` draws the target's own token in every place
            and accepts drafted tokens that equal it, which accepts fewer (CoSpec's base, appendix F). Greedily all
            three are one.
    """

    name = "lossless"
    dial = "verification"
    strictest = 0.0

    verification: str = "token"

    def __post_init__(self) -> None:
        require_choice("verification", self.verification, ("token", "block", "exact"))

    @property
    def spec(self) -> str:
        return self.name if self.verification == "token" else f"{self.name}:verification={self.verification}"

    @property
    def base(self) -> str:
        return self.verification

    @property
    def threshold(self) -> float:
        return float("-inf")

    def risk(self, evidence: Evidence) -> Tensor:
        """+inf throughout."""
        return torch.full(evidence.token_ids.shape, float("inf"), device=evidence.token_ids.device)


def greedy_accepts(
    target_logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...], int64
) -> Tensor:  # [...], bool
    """Whether each drafted token is the target's own first choice."""
    return target_logits.argmax(-1) == token_ids


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
    """What to sample from after a rejection: the positive part of target - proposal, normalised.

    Where target and proposal agree entirely nothing can have been rejected but by rounding; the target is returned.
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
) -> tuple[int, Tensor | None]:  # accepted tokens, residual [V] to sample from; None when all were accepted
    """Joint verification of a chain (arXiv 2403.10444, Algorithm 2): the longest prefix that passes is kept.

    With p_0 = 1 and p_i = min(1, p_{i-1} target(x_i) / proposal(x_i)), prefix i passes with probability
    S_i / (S_i + 1 - p_i), S_i = sum of (p_i target - proposal)+ at the next position, and p_K for the whole block.
    """
    num_tokens = len(token_ids)
    ratios = gather_token(target_probs, token_ids) / gather_token(proposal_probs, token_ids)
    joint = [1.0]
    for ratio in ratios.tolist():
        joint.append(min(1.0, joint[-1] * ratio))
    draws = uniforms.tolist()
    if draws[-1] < joint[-1]:
        return num_tokens, None
    for prefix in range(num_tokens - 1, 0, -1):
        residual = (joint[prefix] * target_probs[prefix] - proposal_probs[prefix]).clamp_min(0)
        mass = float(residual.sum())
        if mass > 0 and draws[prefix - 1] < mass / (mass + 1 - joint[prefix]):
            return prefix, residual / mass
    residual = (target_probs[0] - proposal_probs[0]).clamp_min(0)
    return 0, residual / residual.sum() if float(residual.sum()) > 0 else target_probs[0]
