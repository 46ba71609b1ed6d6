"""From risks to an outcome: the one acceptance walk, for chains and trees, greedy and sampling, any rule.

No model, no cache, no random generator. The device is waited for once: what the walk needs comes over in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reprieve.rules.base import Rule, bounded_risk
from reprieve.rules.checks import Checked
from reprieve.transfers import to_host
from reprieve.types import ROOT, Block, Evidence, Outcome, Provenance


@dataclass
class RiskBudget:
    """What is left of an answer's risk budget; lives as long as the answer."""

    left: float = math.inf

    @classmethod
    def of(cls, rule: Rule) -> RiskBudget:
        """The budget of a whole answer."""
        return cls(math.inf if rule.traits.risk_budget is None else rule.traits.risk_budget)


def accept(
    rule: Rule,
    block: Block,
    evidence: Evidence,
    checked: Checked,
    *,
    budget: RiskBudget,
    threshold: float | None = None,
) -> Outcome:
    """Walk from the last committed token down the accepted branch and choose the token that follows it.

    At each place the children are tried in drafting order by the lossless check. Only if it refuses them all is the
    child of least risk rescued, provided its risk is within the threshold and within the limits. Rules that rescue in
    turn are asked about each child as soon as the check refuses it; rules that replace the check take the child of
    least risk at once.

    Args:
        checked: what the lossless check says of the block.
        budget: reduced in place by the risk of what is rescued.
        threshold: overrides the rule's own, in the unit of its risk.
    """
    walk = _Walk(rule, block, evidence, checked, rule.threshold if threshold is None else threshold, budget)
    path: list[int] = []
    provenance: list[Provenance] = []
    place = ROOT
    while children := block.children.get(place, []):
        node, kind = walk.choose(children)
        if node is None:
            break
        path.append(node)
        provenance.append(kind)
        place = node
    return Outcome(
        path=path,
        token_ids=[walk.token_ids[node] for node in path],
        provenance=provenance,
        next_token_id=walk.next_ids[place + 1],
        risks=None if walk.risks is None else [walk.risks[node] for node in path],
    )


class _Walk:
    """The decisions at one place of the tree after another, on the host."""

    def __init__(
        self, rule: Rule, block: Block, evidence: Evidence, checked: Checked, limit: float, budget: RiskBudget
    ) -> None:
        self.replaces = rule.traits.replaces
        self.in_turn = rule.traits.rescues_in_turn
        self.relaxed = rule.traits.relaxes_target and not evidence.greedy
        self.limit = limit
        self.budget = budget
        most = rule.traits.max_rescues_per_block
        self.rescues_left = math.inf if most is None else most
        has_risk = block.num_tokens > 0 and limit > -math.inf
        risk = bounded_risk(rule, evidence) if has_risk else torch.empty(0, device=block.token_ids.device)
        fetched = to_host(block.token_ids, checked.accepts, checked.passes, checked.next_ids, risk)
        self.token_ids = [int(token_id) for token_id in fetched[0]]
        self.lossless, self.passes = ([bool(flag) for flag in flags] for flags in fetched[1:3])
        self.next_ids = [int(token_id) for token_id in fetched[3]]
        self.risks = fetched[4] if has_risk else None

    def choose(self, children: Sequence[int]) -> tuple[int | None, Provenance]:
        """The accepted child and how it passed; or None."""
        if self.replaces:
            best = self._least_risk(children)
            return best, self._by_flag(best)
        for node in children:
            if self.passes[node]:
                # Verified against the rule's own distribution, the flag says whether the target's would have passed it.
                return node, self._by_flag(node) if self.relaxed else Provenance.MATCHED
            if self.in_turn and self._rescue([node]) is not None:
                return node, Provenance.RESCUED
        return None if self.in_turn else self._rescue(children), Provenance.RESCUED

    def _by_flag(self, node: int | None) -> Provenance:
        return Provenance.MATCHED if node is not None and self.lossless[node] else Provenance.RESCUED

    def _least_risk(self, children: Sequence[int]) -> int | None:
        if self.risks is None:
            return None
        risks = self.risks
        best = min(children, key=lambda node: _nan_last(risks[node]))
        return best if risks[best] <= self.limit and risks[best] < math.inf else None

    def _rescue(self, children: Sequence[int]) -> int | None:
        best = self._least_risk(children) if self.rescues_left >= 1 else None
        if best is None or self.risks is None or max(0.0, self.risks[best]) > self.budget.left:
            return None
        self.rescues_left -= 1
        # Negative and infinite risks (typical's, an any_of's) cost nothing: budgets belong to rules with risk >= 0.
        self.budget.left -= max(0.0, self.risks[best])
        return best


def _nan_last(risk: float) -> float:
    return math.inf if math.isnan(risk) else risk
