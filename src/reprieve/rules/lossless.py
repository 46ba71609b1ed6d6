"""Lossless checks, which keep the target's output distribution, and the rule that adds nothing to them.

Token by token: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). Block verification: Sun et al.
(arXiv 2403.10444). A check decides which drafted tokens pass and which token follows the accepted ones. It computes all
decisions of a round as tensors on the device, so that the host waits once. Random draws are arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_choice
from reprieve.rules.base import Rule, Traits, register_rule
from reprieve.transfers import device_tensor
from reprieve.types import Block, Evidence, gather_token

DrawTokens = Callable[[Tensor], Tensor]  # draws one token from each row of probabilities: [n, V] to [n]
Rows = Tensor | slice


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
    origin = "Leviathan et al. 2211.17192; Chen et al. 2302.01318; block verification: Sun et al. 2403.10444"

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


@dataclass(frozen=True)
class Checked:
    """Decisions of the lossless check for one block, before any rule applies.

    Row 0 belongs to the last committed token, row i + 1 to node i.
    """

    accepts: Tensor  # [N], bool: accepted if tried alone
    passes: Tensor  # [N], bool: accepted after the earlier siblings were refused
    next_ids: Tensor  # [N + 1], int64: the token after each row if no child is accepted


class LosslessCheck(ABC):
    """Lossless check of the drafted tokens of one round.

    Args:
        scores: [R, V], logits whose softmax the target's tokens are drawn from; raw when greedy.
        token_ids: [N], the drafted tokens.
        rows: for each drafted token, the row of `scores` that it is checked against.
    """

    own_ids: Tensor | None = None  # [N], the target's own draw at each position, if MatchCheck drew it

    def __init__(self, scores: Tensor, token_ids: Tensor, rows: Rows) -> None:
        self.scores = scores
        self.token_ids = token_ids
        self.rows = rows

    @property
    @abstractmethod
    def accepts(self) -> Tensor:
        """Mask of tokens that the check would accept if tried alone: [N], bool."""

    @abstractmethod
    def resolve(self, block: Block, *, relaxed_probs: Tensor | None = None, residual: bool = True) -> Checked:
        """Decide the whole block. `scores` needs a row for the last committed token and one for each node.

        Args:
            relaxed_probs: [N, V], distributions to verify against instead of the target's; sampling only.
            residual: draw the token after a rejection from the residual instead of the target; sampling only.
        """


class MatchCheck(LosslessCheck):
    """Accept a token that equals the target's own: its first choice, or its draw (`exact`; CoSpec, appendix F).

    Args:
        draw: draws the target's tokens; None takes the first choices.
    """

    def __init__(self, scores: Tensor, token_ids: Tensor, rows: Rows, draw: DrawTokens | None = None) -> None:
        super().__init__(scores, token_ids, rows)
        self.next_ids = scores.argmax(-1) if draw is None else draw(scores.softmax(-1))  # [R], int64
        self.own_ids = None if draw is None else self.next_ids[rows]

    @cached_property
    def accepts(self) -> Tensor:
        return self.next_ids[self.rows] == self.token_ids

    def resolve(self, block: Block, *, relaxed_probs: Tensor | None = None, residual: bool = True) -> Checked:
        return Checked(self.accepts, self.accepts, self.next_ids)


class SampledCheck(LosslessCheck):
    """Speculative sampling: accept a token with probability min(1, target / proposal).

    Args:
        uniforms: [N], in [0, 1).
        proposal_probs: [N], the probability each token was proposed with; None for deterministic drafts.
        draft_probs: [N, V], the distributions they were drawn from, for the residual; None for deterministic drafts.
        draw: draws the following tokens.
    """

    def __init__(
        self,
        scores: Tensor,
        token_ids: Tensor,
        rows: Rows,
        *,
        uniforms: Tensor,
        proposal_probs: Tensor | None,
        draft_probs: Tensor | None = None,
        draw: DrawTokens | None = None,
    ) -> None:
        super().__init__(scores, token_ids, rows)
        self.uniforms = uniforms
        self.draft_probs = draft_probs
        self.ceilings = uniforms if proposal_probs is None else uniforms * proposal_probs
        self.draw = draw

    @cached_property
    def accepts(self) -> Tensor:
        return self.ceilings < gather_token(self.probs[self.rows], self.token_ids)

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities of the target, [R, V]."""
        return self.scores.softmax(-1)

    def resolve(self, block: Block, *, relaxed_probs: Tensor | None = None, residual: bool = True) -> Checked:
        """Try siblings in drafting order, each against the residual of the earlier ones (multi-round sampling)."""
        assert self.draw is not None
        left = self.probs.clone() if residual else self.probs
        passes = self.accepts
        if residual and block.num_tokens:
            passes = torch.zeros_like(passes)
            for turn, siblings in enumerate(zip_longest(*block.children.values())):
                nodes = [node for node in siblings if node is not None]
                self._try(block, nodes, left, passes, relaxed_probs if turn == 0 else None)
        return Checked(self.accepts, passes, self.draw(left))

    def _try(self, block: Block, nodes: list[int], left: Tensor, passes: Tensor, relaxed: Tensor | None) -> None:
        """Try one sibling of every node; `left` [N + 1, V] and `passes` [N] are updated in place."""
        whole = len(nodes) == block.num_tokens
        device = self.token_ids.device
        index: Rows = slice(None) if whole else device_tensor(nodes, torch.long, device)
        rows = self.rows if whole else device_tensor([block.parents[node] + 1 for node in nodes], torch.long, device)
        probs = left[rows] if relaxed is None else relaxed[index]
        token_ids = self.token_ids[index]
        passes[index] = self.ceilings[index] < gather_token(probs, token_ids)
        proposal = None if self.draft_probs is None else self.draft_probs[index]
        left[rows] = residual_probs(probs, proposal, token_ids)


class BlockCheck(SampledCheck):
    """Joint verification of a whole chain; keeps at least as many tokens on average (arXiv 2403.10444)."""

    def resolve(self, block: Block, *, relaxed_probs: Tensor | None = None, residual: bool = True) -> Checked:
        """Return the longest prefix that passes, and the token that follows each prefix.

        Raises:
            SpecError: a tree.
        """
        assert self.draw is not None
        if not block.is_chain:
            raise SpecError("lossless:verification=block needs a chain, got a tree; use verification=token")
        if not block.num_tokens:
            return Checked(self.accepts, self.accepts, self.draw(self.probs))
        proposal = self.draft_probs
        if proposal is None:
            proposal = torch.nn.functional.one_hot(self.token_ids, self.probs.shape[-1]).to(self.probs.dtype)
        num_accepted, residuals = block_verification(self.probs[:-1], proposal, self.token_ids, self.uniforms)
        passes = torch.arange(block.num_tokens, device=self.token_ids.device) < num_accepted
        return Checked(self.accepts, passes, self.draw(torch.cat([residuals, self.probs[-1:]])))
