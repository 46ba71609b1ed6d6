"""FLy (arXiv 2511.22972): an entropy gate and a deferred window inside the block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from reprieve.errors import require_choice, require_counts, require_range
from reprieve.rules.base import Dial, Rule, register_rule
from reprieve.rules.distributions import entropy
from reprieve.transfers import device_tensor
from reprieve.types import ROOT, Evidence, node_depths


def matching_run(matches: Tensor, parents: Sequence[int]) -> Tensor:
    """Return the length of the longest unbroken run of matching nodes below each node: [N] bool to [N] int64.

    On a chain this counts the matching tokens right after a token; on a tree, along the best branch.
    """
    num_nodes = len(parents)
    below = torch.zeros(num_nodes, dtype=torch.long, device=matches.device)
    if not num_nodes:
        return below
    # Level by level from the leaves: a node's own run passes to its parent, if the node matches.
    for level in reversed(_levels(tuple(parents))):
        nodes = device_tensor([node for node in level if parents[node] != ROOT], torch.long, matches.device)
        above = device_tensor([parents[node] for node in level if parents[node] != ROOT], torch.long, matches.device)
        runs = torch.where(matches[nodes], below[nodes] + 1, 0)
        below = below.scatter_reduce(0, above, runs, "amax")
    return below


@lru_cache(maxsize=64)
def _levels(parents: tuple[int, ...]) -> list[list[int]]:
    """Nodes by depth."""
    levels: dict[int, list[int]] = {}
    for node, depth in enumerate(node_depths(parents)):
        levels.setdefault(depth, []).append(node)
    return list(levels.values())


def truncated_entropy(probs: Tensor, k: int) -> Tensor:
    """-sum p ln p over the k most likely tokens, nats, not renormalised: [..., V] to [...]."""
    return entropy(probs.topk(min(k, probs.shape[-1]), dim=-1).values)


@register_rule
@dataclass(frozen=True)
class FlyRule(Rule):
    """Accept a mismatch where the target is uncertain and the next `window` drafted tokens match again.

    Args:
        theta: least entropy of the target; lower is more lenient, inf is lossless.
        window: matching tokens needed after the mismatch. They must fit into the block, so its last tokens are never
            relaxed. None uses the variant's default: 5 (`amd`), min(6, K - 1) (`vllm`), 6 (`normalised`). K is the
            engine's setting, even for a shorter block; if K varies, it is the depth of the block.
        variant: `amd`, the authors' code: entropy over the top 3, in nats, matches by argmax; `vllm`, the port in
            vLLM 0.33: as `amd`, but the window counts tokens the lossless check accepts; `normalised`: full entropy
            over ln V, as the paper describes it.

    Relaxed: no bound on the output distribution.
    """

    name = "fly"
    own_dial = Dial("theta", strictest=math.inf, stops=(3.0, 2.0, 1.0, 0.6, 0.3, 0.1, 0.0))
    origin = "FLy 2511.22972; shipped by AMD, vLLM 0.33"

    theta: float = 0.3
    window: int | None = None
    variant: str = "amd"

    def __post_init__(self) -> None:
        require_choice("variant", self.variant, ("amd", "vllm", "normalised"))
        require_range("theta", self.theta, 0.0, math.inf)
        require_counts(self, "window")

    @property
    def threshold(self) -> float:
        return -self.theta

    def window_for(self, num_draft_tokens: int) -> int:
        """Return the window at this K."""
        if self.window is not None:
            return self.window
        return {"amd": 5, "vllm": max(1, min(6, num_draft_tokens - 1)), "normalised": 6}[self.variant]

    def risk(self, evidence: Evidence) -> Tensor:
        """Return minus the target's entropy, [N]; infinite where the window does not match or does not fit."""
        parents = range(-1, evidence.token_ids.shape[-1] - 1) if evidence.parents is None else evidence.parents
        if self.variant == "vllm":
            matches = evidence.lossless_accepts
        else:
            matches = evidence.scores.argmax(-1) == evidence.token_ids
        if evidence.padding is not None:
            matches = matches & ~evidence.padding
        if self.variant == "normalised":
            uncertainty = entropy(evidence.target_probs) / math.log(evidence.target_probs.shape[-1])
        else:
            uncertainty = truncated_entropy(evidence.target_probs, 3)
        k = len(_levels(tuple(parents))) if evidence.num_draft_tokens is None else evidence.num_draft_tokens
        fits = matching_run(matches, parents) >= self.window_for(k)
        return torch.where(fits, -uncertainty, math.inf)
