"""Lossless checks: decide which drafted tokens pass and which token follows the accepted ones.

Three methods keep the target's distribution: greedy matching, speculative sampling (token by token or block-wise),
and exact match with the target's own draws. Each computes all decisions of a round as tensors on the device, so
that the host waits once. Random draws are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.rules.lossless import block_verification, residual_probs
from reprieve.transfers import spread
from reprieve.types import ROOT, Block, gather_token

Draw = Callable[[Tensor], Tensor]  # draws one token from each row of probabilities: [n, V] to [n]
Rows = Tensor | slice


@dataclass(frozen=True)
class Checked:
    """Decisions of the lossless check for one block, before any rule applies.

    Row 0 belongs to the last committed token, row i + 1 to node i.
    """

    accepts: Tensor  # [N], bool: accepted if tried alone
    passes: Tensor  # [N], bool: accepted after the earlier siblings were refused
    next_ids: Tensor  # [N + 1], int64: the token after each row if no child is accepted

    @classmethod
    def of_flags(cls, accepts: Tensor) -> Checked:
        """Wrap the decisions of an engine that draws the following tokens itself."""
        return cls(accepts, accepts, torch.zeros(len(accepts) + 1, dtype=torch.long, device=accepts.device))


class LosslessCheck:
    """Lossless check of the drafted tokens of one round.

    Args:
        scores: [R, V], logits whose softmax the target's tokens are drawn from; raw when greedy.
        token_ids: [N], the drafted tokens.
        rows: for each drafted token, the row of `scores` that it is checked against.
    """

    own_ids: Tensor | None = None  # [N], the target's own draw at each position, for ExactCheck

    def __init__(self, scores: Tensor, token_ids: Tensor, rows: Rows) -> None:
        self.scores = scores
        self.token_ids = token_ids
        self.rows = rows

    @cached_property
    def accepts(self) -> Tensor:
        """Mask of tokens that the check would accept if tried alone: [N], bool."""
        raise NotImplementedError

    def settle(self, block: Block, *, relaxed_probs: Tensor | None = None, residual: bool = True) -> Checked:
        """Decide the whole block. `scores` needs a row for the last committed token and one for each node.

        Args:
            relaxed_probs: [N, V], distributions to verify against instead of the target's; sampling only.
            residual: draw the token after a rejection from the residual instead of the target; sampling only.
        """
        return Checked(self.accepts, self.accepts, self.next_ids)

    @cached_property
    def next_ids(self) -> Tensor:
        """Token that follows each row: [R], int64."""
        raise NotImplementedError


class GreedyCheck(LosslessCheck):
    """Accept a token that equals the target's first choice."""

    @cached_property
    def next_ids(self) -> Tensor:
        return self.scores.argmax(-1)

    @cached_property
    def accepts(self) -> Tensor:
        return self.next_ids[self.rows] == self.token_ids


class ExactCheck(LosslessCheck):
    """Accept a token that equals the target's own draw at its position (CoSpec, appendix F).

    Args:
        draw: draws the target's tokens.
    """

    def __init__(self, scores: Tensor, token_ids: Tensor, rows: Rows, draw: Draw) -> None:
        super().__init__(scores, token_ids, rows)
        self.drawn = draw(scores.softmax(-1))
        self.own_ids = self.drawn[rows]

    @cached_property
    def accepts(self) -> Tensor:
        return self.drawn[self.rows] == self.token_ids

    @cached_property
    def next_ids(self) -> Tensor:
        return self.drawn


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
        draw: Draw | None = None,
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

    def settle(self, block: Block, *, relaxed_probs: Tensor | None = None, residual: bool = True) -> Checked:
        """Try siblings in drafting order, each against the residual of the earlier ones (multi-round sampling)."""
        assert self.draw is not None
        left = self.probs.clone() if residual else self.probs
        passes = self.accepts
        if residual and block.num_tokens:
            passes = torch.zeros_like(passes)
            for turn, nodes in enumerate(_by_turn(block)):
                self._try(block, nodes, left, passes, relaxed_probs if turn == 0 else None)
        return Checked(self.accepts, passes, self.draw(left))

    def _try(self, block: Block, nodes: list[int], left: Tensor, passes: Tensor, relaxed: Tensor | None) -> None:
        """Try one sibling of every node; `left` [N + 1, V] and `passes` [N] are updated in place."""
        whole = len(nodes) == block.num_tokens
        device = self.token_ids.device
        index: Rows = slice(None) if whole else spread(nodes, torch.long, device)
        rows = self.rows if whole else spread([block.parents[node] + 1 for node in nodes], torch.long, device)
        probs = left[rows] if relaxed is None else relaxed[index]
        token_ids = self.token_ids[index]
        passes[index] = self.ceilings[index] < gather_token(probs, token_ids)
        proposal = None if self.draft_probs is None else self.draft_probs[index]
        left[rows] = residual_probs(probs, proposal, token_ids)


class BlockCheck(SampledCheck):
    """Joint verification of a whole chain; keeps at least as many tokens on average (arXiv 2403.10444)."""

    def settle(self, block: Block, *, relaxed_probs: Tensor | None = None, residual: bool = True) -> Checked:
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


def _by_turn(block: Block) -> list[list[int]]:
    """Group nodes by sibling index: the first child of every node, then the second ones, and so on."""
    turns: list[list[int]] = []
    for parent in (ROOT, *range(block.num_tokens)):
        for turn, node in enumerate(block.children.get(parent, [])):
            if turn == len(turns):
                turns.append([])
            turns[turn].append(node)
    return turns
