"""Pruning of drafted trees before verification: ARC-Decode, section 3.2, and its baselines.

Pure functions of a tree's shape and the drafter's log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reprieve.errors import SpecError, require_choice, require_range
from reprieve.types import ROOT, node_depths

# Parameters of each strategy.
PARAMETERS = {
    "entropy": ("epsilon", "budget", "entropy_weight", "leaf"),
    "depth": ("keep", "alpha"),
    "depth_exp": ("keep", "alpha"),
    "path_prob": ("keep",),
}


@dataclass(frozen=True)
class Pruning:
    """Selection of the drafted nodes to verify.

    Args:
        strategy: `entropy` is the paper's; `depth`, `depth_exp` and `path_prob` are the node-wise rankings of its
            Table 8.
        epsilon: share of each depth's path mass that may be cut, [0, 1); the paper uses 0.05.
        budget: the paper's delta, (0, 1]: divided equally among the depths and used instead of `epsilon`; None for
            `epsilon`.
        entropy_weight: lambda, 0 or more.
        leaf: leaves with less entropy-scaled mass than this are cut at every depth, [0, 1]; tau_d of Eq. 4 is the
            larger of `leaf` and theta_d.
        keep: share of the nodes that `depth`, `depth_exp` and `path_prob` keep, (0, 1].
        alpha: weight of the depth for `depth` and `depth_exp`.

    Eq. 1 scales all nodes of one depth alike, so the entropy does not affect which nodes pass Eq. 3; it acts
    through `leaf`. The paper prints "smallest" where Eq. 3 needs the largest theta_d: the smallest keeps everything.
    """

    strategy: str = "entropy"
    epsilon: float = 0.05
    budget: float | None = None
    entropy_weight: float = 1.0
    leaf: float = 0.0
    keep: float = 0.8
    alpha: float = 0.1

    def __post_init__(self) -> None:
        require_choice("prune", self.strategy, tuple(PARAMETERS))
        if not 0.0 <= self.epsilon < 1.0:
            raise SpecError(f"epsilon must be in [0, 1), got {self.epsilon!r}")
        require_range("budget", self.budget, 0.0, 1.0, low_open=True, optional=True)
        require_range("entropy_weight", self.entropy_weight, 0.0, 1e6)
        require_range("leaf", self.leaf, 0.0, 1.0)
        require_range("keep", self.keep, 0.0, 1.0, low_open=True)
        require_range("alpha", self.alpha, -1e6, 1e6)

    def kept(self, parents: Sequence[int], log_probs: Sequence[float], root_entropy: float) -> list[int]:
        """Return the indices of the nodes to verify, in their original order; parents of kept nodes are kept.

        Args:
            parents: [N], ROOT or an earlier node.
            log_probs: [N], the drafter's log-probability of the path down to each node, nats.
            root_entropy: entropy of the target's distribution at the root, divided by log V: 0 to 1.
        """
        if not parents:
            return []
        depths = [depth - 1 for depth in node_depths(parents)]  # 0 for the first drafted tokens, as in the paper
        if self.strategy == "entropy":
            return self._by_mass(parents, depths, log_probs, root_entropy)
        return self._by_rank(parents, depths, log_probs)

    def _by_mass(
        self, parents: Sequence[int], depths: Sequence[int], log_probs: Sequence[float], root_entropy: float
    ) -> list[int]:
        scores = [
            math.exp(log_prob - self.entropy_weight * depth * root_entropy)
            for log_prob, depth in zip(log_probs, depths, strict=True)
        ]
        share = self.epsilon if self.budget is None else self.budget / (max(depths) + 1)
        thresholds = [
            _covering(sorted((s for s, d in zip(scores, depths, strict=True) if d == depth), reverse=True), 1 - share)
            for depth in range(max(depths) + 1)
        ]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        kept: set[int] = set()
        for above in (ROOT, *range(len(parents))):  # parents come before their children
            below = children.get(above, [])
            if not below or (above != ROOT and above not in kept):
                continue
            passed = [
                node
                for node in below
                if scores[node] >= thresholds[depths[node]] and (node in children or scores[node] >= self.leaf)
            ]
            kept.update(passed or [max(below, key=lambda node: scores[node])])
        return sorted(kept)

    def _by_rank(self, parents: Sequence[int], depths: Sequence[int], log_probs: Sequence[float]) -> list[int]:
        """Return the best-ranked nodes, without those whose parent is not among them; at least the best root."""
        if self.strategy == "depth":
            scores = [math.exp(log_prob) + self.alpha * d for log_prob, d in zip(log_probs, depths, strict=True)]
        else:
            bias = self.alpha if self.strategy == "depth_exp" else 0.0
            scores = [log_prob + bias * depth for log_prob, depth in zip(log_probs, depths, strict=True)]
        num_kept = max(1, round(self.keep * len(parents)))
        ranked = sorted(range(len(parents)), key=lambda node: -scores[node])
        best = set(ranked[:num_kept])
        kept: set[int] = set()
        for node, parent in enumerate(parents):
            if node in best and (parent == ROOT or parent in kept):
                kept.add(node)
        return sorted(kept) or [node for node in ranked if parents[node] == ROOT][:1]


def _covering(scores: Sequence[float], share: float) -> float:
    """Return the largest threshold such that the scores at or above it sum to `share` of all; scores are descending."""
    wanted, so_far = share * sum(scores), 0.0
    for score in scores:
        so_far += score
        if so_far >= wanted * (1 - 1e-12):
            return score
    return scores[-1]
