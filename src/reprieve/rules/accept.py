"""Acceptance walk: turns risks into an outcome, for chains and trees, greedy and sampling, and any rule.

No model, no cache, no random generator. The host waits for the device once, for one copy of all inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.rules.base import Rule, bounded_risk
from reprieve.rules.lossless import Checked
from reprieve.transfers import to_host
from reprieve.types import ROOT, Block, Evidence, Outcome, Provenance


@dataclass
class RiskBudget:
    """Risk that an answer may spend on rescues, and what it has spent; in a batch, that lies on the device."""

    limit: float = math.inf
    spent: float | Tensor = 0.0

    @classmethod
    def of(cls, rule: Rule) -> RiskBudget:
        """Return the rule's budget for a whole answer."""
        budget = cls()
        budget.follow(rule)
        return budget

    def follow(self, rule: Rule) -> None:
        """Take the limit of the rule that is in force; what was spent remains."""
        budget = None if rule.limits is None else rule.limits.budget
        self.limit = math.inf if budget is None else budget

    @property
    def left(self) -> float | Tensor:
        return self.limit - self.spent

    def on(self, device: torch.device) -> Tensor:
        """Return the remaining budget on the device: [], float64."""
        left = self.left
        return left if isinstance(left, Tensor) else torch.full((), left, dtype=torch.float64, device=device)


def accept(rule: Rule, block: Block, evidence: Evidence, checked: Checked, *, budget: RiskBudget) -> Outcome:
    """Walk from the last committed token down the accepted branch and choose the token that follows it.

    At each node, the lossless check tries the children in drafting order. If it rejects all of them, the child with the
    lowest risk is rescued, provided its risk is within the threshold and the limits. Rules with `rescues_in_turn` score
    each child as soon as the check rejects it. Rules that replace the check accept the child with the lowest risk if
    that risk is within the threshold.

    Args:
        checked: decisions of the lossless check for the block.
        budget: reduced in place by the risk of each rescue.
    """
    walk = _Walk(rule, block, evidence, checked, budget)
    path: list[int] = []
    provenance: list[Provenance] = []
    parent = ROOT
    while children := block.children.get(parent, []):
        node, kind = walk.choose(children)
        if node is None:
            break
        path.append(node)
        provenance.append(kind)
        parent = node
    return Outcome(
        path=path,
        token_ids=[walk.token_ids[node] for node in path],
        provenance=provenance,
        next_token_id=walk.next_ids[parent + 1],
        risks=None if walk.risks is None else [walk.risks[node] for node in path],
    )


class _Walk:
    """Decisions at successive nodes of the tree, on the host."""

    def __init__(self, rule: Rule, block: Block, evidence: Evidence, checked: Checked, budget: RiskBudget) -> None:
        self.replaces = rule.traits.replaces
        self.in_turn = rule.rescues_in_turn
        self.relaxed = rule.relaxes_target and not evidence.greedy
        self.limit = rule.threshold
        self.budget = budget
        most = None if rule.limits is None else rule.limits.per_block
        self.rescues_left = math.inf if most is None else most
        has_risk = block.num_tokens > 0 and self.limit > -math.inf
        risk = bounded_risk(rule, evidence) if has_risk else torch.empty(0, device=block.token_ids.device)
        fetched = to_host(block.token_ids, checked.accepts, checked.passes, checked.next_ids, risk)
        self.token_ids = [int(token_id) for token_id in fetched[0]]
        self.lossless, self.passes = ([bool(flag) for flag in flags] for flags in fetched[1:3])
        self.next_ids = [int(token_id) for token_id in fetched[3]]
        self.risks = fetched[4] if has_risk else None

    def choose(self, children: Sequence[int]) -> tuple[int | None, Provenance]:
        """Return the accepted child, or None, and its provenance."""
        if self.replaces:
            best = self._least_risk(children)
            return best, self._by_flag(best)
        for node in children:
            if self.passes[node]:
                # The check ran against the rule's own distribution; the flag holds the result against the target's.
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
        best = min(children, key=lambda node: (math.isnan(risks[node]), risks[node]))
        return best if risks[best] <= self.limit and risks[best] < math.inf else None

    def _rescue(self, children: Sequence[int]) -> int | None:
        best = self._least_risk(children) if self.rescues_left >= 1 else None
        if best is None or self.risks is None or max(0.0, self.risks[best]) > self.budget.left:
            return None
        self.rescues_left -= 1
        # Negative and infinite risks (typical, any_of) cost nothing: budgets belong to rules with risk >= 0.
        self.budget.spent += max(0.0, self.risks[best])
        return best
