"""From risks to an outcome: the one acceptance walk, for chains and trees, greedy and sampling, any rule.

Pure tensors and numbers: no model, no cache, no random generator. Draws are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.rules.base import Rule
from reprieve.rules.lossless import LosslessRule, block_verification, residual_probs
from reprieve.types import ROOT, Block, Evidence, Outcome, Provenance

Sample = Callable[[Tensor], int]  # probabilities [V] to a token id


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
    next_probs: Tensor,  # [N + 1, V]: after the last committed token (row 0) and after each node
    *,
    sample: Sample,
    budget: RiskBudget,
    threshold: float | None = None,
) -> Outcome:
    """Walk from the last committed token down the accepted branch and choose the token that follows it.

    At each place the children are tried in drafting order by the lossless check (when sampling, with the residual
    updated after each refusal: multi-round speculative sampling). Only if it refuses them all is the child of least
    risk rescued, provided its risk is within the threshold and within the limits. Rules that replace the check take
    the child of least risk at once.

    Args:
        sample: draws from probabilities; the argmax when greedy.
        budget: reduced in place by the risk of what is rescued.
        threshold: overrides the rule's own.
    """
    if isinstance(rule, LosslessRule) and rule.verification == "block" and not evidence.greedy and block.num_tokens:
        return _accept_block(block, evidence, next_probs, sample)
    limit = rule.threshold if threshold is None else threshold
    walk = _Walk(rule, block, evidence, limit, budget)
    path: list[int] = []
    provenance: list[Provenance] = []
    place = ROOT
    while children := block.children.get(place, []):
        node, final_probs = walk.choose(children)
        if node is None:
            token = sample(next_probs[place + 1] if final_probs is None else final_probs)
            return Outcome(path, provenance, token, walk.risks_of(path))
        path.append(node)
        provenance.append(Provenance.MATCHED if walk.lossless[node] else Provenance.RESCUED)
        place = node
    return Outcome(path, provenance, sample(next_probs[place + 1]), walk.risks_of(path))


class _Walk:
    """The decisions at one place of the tree after another; reads every tensor once, up front."""

    def __init__(self, rule: Rule, block: Block, evidence: Evidence, limit: float, budget: RiskBudget) -> None:
        self.rule = rule
        self.block = block
        self.evidence = evidence
        self.limit = limit
        self.budget = budget
        self.relaxed_probs = rule.relaxed_target_probs(evidence)
        self.lossless: list[bool] = evidence.lossless_accepts.tolist()
        self.risks: list[float] | None = None
        if rule.replaces or limit > -math.inf:
            self.risks = rule.risk(evidence).tolist()
        self.rescues_left = math.inf if rule.max_rescues_per_block is None else rule.max_rescues_per_block

    def risks_of(self, path: list[int]) -> list[float] | None:
        return None if self.risks is None else [self.risks[node] for node in path]

    def choose(self, children: list[int]) -> tuple[int | None, Tensor | None]:
        """The accepted child, or None and the probabilities to sample instead (None for the target's own)."""
        if self.rule.replaces:
            return self._least_risk(children), None
        final_probs = None
        if self.evidence.greedy:
            accepted = next((node for node in children if self.lossless[node]), None)
        else:
            accepted, final_probs = self._sampled(children)
        if accepted is None:
            accepted = self._rescue(children)
        return accepted, final_probs

    def _sampled(self, children: list[int]) -> tuple[int | None, Tensor | None]:
        """Multi-round speculative sampling over siblings: lossless for draws with or without a distribution."""
        evidence = self.evidence
        assert evidence.uniforms is not None
        probs = (evidence.target_probs if self.relaxed_probs is None else self.relaxed_probs)[children[0]]
        for node in children:
            token_id = evidence.token_ids[node]
            proposal = None if self.block.deterministic or evidence.draft_probs is None else evidence.draft_probs[node]
            ceiling = 1.0 if proposal is None else float(proposal[token_id])
            if float(evidence.uniforms[node]) * ceiling < float(probs[token_id]):
                return node, None
            probs = residual_probs(probs, proposal, token_id)
        return None, probs

    def _least_risk(self, children: list[int]) -> int | None:
        assert self.risks is not None
        best = min(children, key=lambda node: _nan_last(self.risks[node]))  # type: ignore[index]
        return best if self.risks[best] <= self.limit and self.risks[best] < math.inf else None

    def _rescue(self, children: list[int]) -> int | None:
        if self.risks is None or self.rescues_left < 1:
            return None
        best = self._least_risk(children)
        if best is None or max(0.0, self.risks[best]) > self.budget.left:
            return None
        self.rescues_left -= 1
        # Negative and infinite risks (typical's, an any_of's) cost nothing: budgets belong to rules with risk >= 0.
        self.budget.left -= max(0.0, self.risks[best])
        return best


def _nan_last(risk: float) -> float:
    return math.inf if math.isnan(risk) else risk


def _accept_block(block: Block, evidence: Evidence, next_probs: Tensor, sample: Sample) -> Outcome:
    assert evidence.uniforms is not None
    proposal = evidence.draft_probs
    if block.deterministic or proposal is None:
        size = evidence.target_probs.shape[-1]
        proposal = torch.nn.functional.one_hot(evidence.token_ids, size).to(evidence.target_probs.dtype)
    num_accepted, residual = block_verification(evidence.target_probs, proposal, evidence.token_ids, evidence.uniforms)
    token = sample(next_probs[num_accepted] if residual is None else residual)
    return Outcome(list(range(num_accepted)), [Provenance.MATCHED] * num_accepted, token)
