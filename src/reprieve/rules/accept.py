"""From risks to an outcome: the one acceptance walk, for chains and trees, greedy and sampling, any rule.

Pure tensors and numbers: no model, no cache, no random generator. Draws are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.rules.base import Rule, bounded_risk
from reprieve.rules.lossless import block_verification, residual_probs
from reprieve.types import ROOT, Block, Evidence, Outcome, Provenance

# The token a round ends with: from the row it follows (0 for the last committed token, i + 1 for node i) and, after a
# refusal by speculative sampling, the residual probabilities [V] to draw from instead of the target's own.
NextToken = Callable[[int, Tensor | None], int]


@dataclass
class RiskBudget:
    """What is left of an answer's risk budget; lives as long as the answer."""

    left: float = math.inf

    @classmethod
    def of(cls, rule: Rule) -> RiskBudget:
        return cls(math.inf if rule.risk_budget is None else rule.risk_budget)


def accept(
    rule: Rule,
    block: Block,
    evidence: Evidence,
    *,
    next_token: NextToken,
    budget: RiskBudget,
    threshold: float | None = None,
    by_flags: bool = False,
) -> Outcome:
    """Walk from the last committed token down the accepted branch and choose the token that follows it.

    At each place the children are tried in drafting order by the lossless check (when sampling, with the residual
    updated after each refusal: multi-round speculative sampling). Only if it refuses them all is the child of least
    risk rescued, provided its risk is within the threshold and within the limits. Rules that rescue in turn are asked
    about each child as soon as the check refuses it; rules that replace the check take the child of least risk at
    once.

    Args:
        next_token: gives the fallback or bonus token.
        budget: reduced in place by the risk of what is rescued.
        threshold: overrides the rule's own, in the unit of its risk.
        by_flags: take `evidence.lossless_accepts` for the lossless check's word when sampling too: another engine has
            drawn already, and draws its own fallback tokens.

    Raises:
        SpecError: block verification of a tree.
    """
    if not block.num_tokens:
        return Outcome([], [], next_token(0, None))
    if rule.base == "block" and not evidence.greedy:
        return _accept_block(block, evidence, next_token)
    walk = _Walk(rule, block, evidence, rule.threshold if threshold is None else threshold, budget)
    walk.flags_decide |= by_flags
    path: list[int] = []
    provenance: list[Provenance] = []
    place = ROOT
    residual = None
    while children := block.children.get(place, []):
        node, kind, residual = walk.choose(children)
        if node is None:
            break
        path.append(node)
        provenance.append(kind)
        place = node
    return Outcome(path, provenance, next_token(place + 1, residual), walk.risks_of(path))


class _Walk:
    """The decisions at one place of the tree after another."""

    def __init__(self, rule: Rule, block: Block, evidence: Evidence, limit: float, budget: RiskBudget) -> None:
        self.rule = rule
        self.block = block
        self.evidence = evidence
        self.limit = limit
        self.budget = budget
        self.relaxed_probs = rule.relaxed_target_probs(evidence)
        self.lossless: list[bool] = evidence.lossless_accepts.tolist()
        self.flags_decide = evidence.greedy or rule.base == "exact"
        self.risks: list[float] | None = None
        if limit > -math.inf:
            self.risks = bounded_risk(rule, evidence).tolist()
        self.rescues_left = math.inf if rule.max_rescues_per_block is None else rule.max_rescues_per_block

    def risks_of(self, path: list[int]) -> list[float] | None:
        return None if self.risks is None else [self.risks[node] for node in path]

    def choose(self, children: list[int]) -> tuple[int | None, Provenance, Tensor | None]:
        """The accepted child and how it passed; or None, and the residual to draw from where there is one."""
        if self.rule.replaces:
            best = self._least_risk(children)
            return best, self._by_flag(best), None
        in_turn = self.rule.rescues_in_turn
        residual = None
        for node, passed, left in self._checked(children):
            residual = left
            if passed:
                # Verified against the rule's own distribution, the flag says whether the target's would have passed it.
                relaxed = self.relaxed_probs is not None
                return node, self._by_flag(node) if relaxed else Provenance.MATCHED, None
            if in_turn and self._rescue([node]) is not None:
                return node, Provenance.RESCUED, None
        return None if in_turn else self._rescue(children), Provenance.RESCUED, residual

    def _by_flag(self, node: int | None) -> Provenance:
        return Provenance.MATCHED if node is not None and self.lossless[node] else Provenance.RESCUED

    def _checked(self, children: list[int]) -> Iterator[tuple[int, bool, Tensor | None]]:
        """Each child in drafting order, whether the lossless check passes it, and what is left to draw from.

        When sampling this is multi-round speculative sampling: lossless for draws with or without a distribution.
        """
        if self.flags_decide:
            yield from ((node, self.lossless[node], None) for node in children)
            return
        evidence = self.evidence
        assert evidence.uniforms is not None
        probs = (evidence.target_probs if self.relaxed_probs is None else self.relaxed_probs)[children[0]]
        for node in children:
            token_id = evidence.token_ids[node]
            proposal = None if self.block.deterministic or evidence.draft_probs is None else evidence.draft_probs[node]
            ceiling = 1.0 if proposal is None else float(proposal[token_id])
            passed = float(evidence.uniforms[node]) * ceiling < float(probs[token_id])
            if not passed:
                probs = residual_probs(probs, proposal, token_id)
            yield node, passed, probs

    def _least_risk(self, children: list[int]) -> int | None:
        if self.risks is None:
            return None
        risks = self.risks
        best = min(children, key=lambda node: _nan_last(risks[node]))
        return best if risks[best] <= self.limit and risks[best] < math.inf else None

    def _rescue(self, children: list[int]) -> int | None:
        best = self._least_risk(children) if self.rescues_left >= 1 else None
        if best is None or self.risks is None or max(0.0, self.risks[best]) > self.budget.left:
            return None
        self.rescues_left -= 1
        # Negative and infinite risks (typical's, an any_of's) cost nothing: budgets belong to rules with risk >= 0.
        self.budget.left -= max(0.0, self.risks[best])
        return best


def _nan_last(risk: float) -> float:
    return math.inf if math.isnan(risk) else risk


def _accept_block(block: Block, evidence: Evidence, next_token: NextToken) -> Outcome:
    if not block.is_chain:
        raise SpecError("lossless:verification=block needs a chain, got a tree; use verification=token")
    assert evidence.uniforms is not None
    proposal = evidence.draft_probs
    if block.deterministic or proposal is None:
        size = evidence.target_probs.shape[-1]
        proposal = torch.nn.functional.one_hot(evidence.token_ids, size).to(evidence.target_probs.dtype)
    num_accepted, residual = block_verification(evidence.target_probs, proposal, evidence.token_ids, evidence.uniforms)
    token = next_token(num_accepted, residual)
    return Outcome(list(range(num_accepted)), [Provenance.MATCHED] * num_accepted, token)
