"""Drafting with an EAGLE-3 head: dynamic trees (EAGLE-2, arXiv 2406.16858) from the target's own hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.drafters.pruning import Pruning
from reprieve.errors import SpecError
from reprieve.models.cache import RollbackCache
from reprieve.models.eagle3 import EagleHead
from reprieve.models.sampling import Sampler
from reprieve.rules.distributions import entropy
from reprieve.types import ROOT, Block, HiddenStates, Outcome, Prefill, Verification

MAX_NODES = 512


@dataclass(frozen=True)
class TreeShape:
    """How large a drafted tree may get.

    Args:
        depth: tokens on its longest path, 1 to 512, as the others.
        top_k: nodes a level that are drafted on from, and children of each; 1 drafts a chain.
        total_tokens: nodes kept in the end, those of the largest joint probability.
    """

    depth: int = 6
    top_k: int = 8
    total_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "total_tokens"):
            if not 1 <= getattr(self, name) <= MAX_NODES:
                raise SpecError(f"{name} must be in [1, {MAX_NODES}], got {getattr(self, name)!r}")


@dataclass
class _Tree:
    """All candidates so far, level by level; rows of `logits` belong to the nodes drafted from, row 0 to the root."""

    token_ids: list[int]
    parents: list[int]
    log_probs: list[float]  # of the whole path
    rows: list[int]  # of the logits each was proposed by
    logits: list[Tensor]  # [draft_vocab_size] each


class EagleDrafter:
    """Proposes a tree, or a chain, from the states of the token before the last committed one.

    The children of a node are the head's most likely tokens, not draws: the block is deterministic, and the lossless
    check accepts a child with the target's own probability.

    Args:
        head: on the target's device; shared among drafters.
        vocab_size: columns of the target's logits.
        shape: of the tree.
        pruning: what to cut before the target sees it; None for nothing.
    """

    name = "eagle3"
    provides = frozenset({"draft_probs"})

    def __init__(
        self, head: EagleHead, *, vocab_size: int, shape: TreeShape | None = None, pruning: Pruning | None = None
    ) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self.shape = shape or TreeShape()
        self.pruning = pruning
        self.device = head.fc.weight.device
        self.target_layers = head.layers_read
        self.drafts_trees = self.shape.top_k > 1
        self._target_ids = head.target_ids
        self._cache = RollbackCache()
        self._length = 0  # cached tokens, drafted ones left out
        self._unread: list[int] = []  # committed tokens the head has not read
        self._states: list[Tensor] = []  # the fused states before them

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        self.sampler = sampler
        self._cache.keep(0)
        self._length = 0
        self._unread = list(prompt_ids[1:])
        self._states = [] if prefill.hidden is None else [self.head.fuse(prefill.hidden)]
        self._root_entropy = self._entropy(prefill.logits)

    def propose(self, max_depth: int) -> Block:
        depth = min(max_depth, self.shape.depth)
        if depth < 1 or not self._states:
            return Block.empty(self.device)
        logits, states = self._read_committed()
        tree = _Tree([], [], [], [], [logits])
        self._expand(tree, [ROOT], [0.0], logits[None])
        ancestors: list[list[int]] = []  # of each node drafted from, as places among those nodes
        places: dict[int, int] = {}
        parent_states = {ROOT: states}
        first = 0
        for level in range(1, depth):
            frontier = self._best(tree, range(first, len(tree.token_ids)))
            first = len(tree.token_ids)
            for node in frontier:
                parent = tree.parents[node]
                places[node] = len(ancestors)
                ancestors.append([*(ancestors[places[parent]] if parent != ROOT else []), places[node]])
            found, hidden = self.head(
                torch.tensor([tree.token_ids[node] for node in frontier], device=self.device),
                torch.stack([parent_states[tree.parents[node]] for node in frontier]),
                cache=self._cache,
                positions=torch.full((len(frontier),), self._length + level - 1, device=self.device),
                mask=self._tree_mask(ancestors, len(frontier)),
            )
            parent_states.update(zip(frontier, hidden, strict=True))
            self._expand(tree, frontier, [tree.log_probs[node] for node in frontier], found)
        self._cache.keep(self._length)
        return self._block(tree)

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        rows = [0, *(node + 1 for node in outcome.path)]
        assert verification.hidden is not None, "the engine asks the target for the layers a drafter reads"
        taken: HiddenStates = {layer: verification.hidden[layer][rows] for layer in self.target_layers}
        self._unread += [*(int(block.token_ids[node]) for node in outcome.path), outcome.next_token_id]
        self._states.append(self.head.fuse(taken))
        self._root_entropy = self._entropy(verification.logits[rows[-1]])

    def _read_committed(self) -> tuple[Tensor, Tensor]:
        """The head's logits and state after the committed tokens, which it reads with the target's states."""
        num, before = len(self._unread), self._length
        mask = None
        if num > 1:
            hidden_from_view = torch.ones(num, before + num, dtype=torch.bool, device=self.device).triu(before + 1)
            mask = self._additive(~hidden_from_view)
        logits, states = self.head(
            torch.tensor(self._unread, device=self.device),
            torch.cat(self._states),
            cache=self._cache,
            positions=torch.arange(before, before + num, device=self.device),
            mask=mask,
        )
        self._length = before + num
        self._unread, self._states = [], []
        return logits[-1], states[-1]

    def _expand(self, tree: _Tree, nodes: Sequence[int], log_probs: Sequence[float], logits: Tensor) -> None:
        """Add the most likely children of each node; `logits` [n, draft_vocab_size] follow the nodes."""
        best = logits.log_softmax(-1).topk(min(self.shape.top_k, logits.shape[-1]), dim=-1)
        ids = self._target_ids[best.indices].tolist()
        for node, so_far, row, values, children in zip(
            nodes, log_probs, logits, best.values.tolist(), ids, strict=True
        ):
            if node != ROOT:
                tree.logits.append(row)
            for token_id, log_prob in zip(children, values, strict=True):
                tree.token_ids.append(token_id)
                tree.parents.append(node)
                tree.log_probs.append(so_far + log_prob)
                tree.rows.append(len(tree.logits) - 1)

    def _best(self, tree: _Tree, nodes: Sequence[int]) -> list[int]:
        """The level's nodes of largest joint probability, in drafting order."""
        return sorted(sorted(nodes, key=lambda node: -tree.log_probs[node])[: self.shape.top_k])

    def _block(self, tree: _Tree) -> Block:
        """The candidates of largest joint probability, pruned, with the logits that proposed each."""
        # A child is never likelier than its parent, and comes later: a stable sort keeps parents with their children.
        order = sorted(range(len(tree.token_ids)), key=lambda node: -tree.log_probs[node])
        chosen = sorted(order[: self.shape.total_tokens])
        parents = _renumbered(tree.parents, chosen)
        num_pruned = 0
        if self.pruning is not None:
            log_probs = [tree.log_probs[node] for node in chosen]
            kept = self.pruning.kept(parents, log_probs, self._root_entropy)
            num_pruned = len(chosen) - len(kept)
            parents = _renumbered(parents, kept)
            chosen = [chosen[node] for node in kept]
        if not chosen:
            return Block(torch.empty(0, dtype=torch.long, device=self.device), (), num_pruned=num_pruned)
        logits = torch.full((len(chosen), self.vocab_size), -math.inf, device=self.device)
        logits[:, self._target_ids] = torch.stack([tree.logits[tree.rows[node]] for node in chosen])
        return Block(
            torch.tensor([tree.token_ids[node] for node in chosen], device=self.device),
            tuple(parents),
            draft_logits=logits,
            deterministic=True,
            num_pruned=num_pruned,
        )

    def _tree_mask(self, ancestors: Sequence[Sequence[int]], num_new: int) -> Tensor:
        """Each of the last `num_new` nodes sees the committed text, its ancestors and itself."""
        visible = torch.zeros(num_new, self._length + len(ancestors), dtype=torch.bool)
        visible[:, : self._length] = True
        for row, seen in enumerate(ancestors[-num_new:]):
            visible[row, [self._length + place for place in seen]] = True
        return self._additive(visible.to(self.device))

    def _additive(self, visible: Tensor) -> Tensor:
        dtype = self.head.fc.weight.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]

    def _entropy(self, logits: Tensor | None) -> float:
        """Normalised entropy of the target's distribution [V] that chose the root (ARC-Decode, Eq. 2)."""
        if self.pruning is None or logits is None:
            return 1.0
        probs = self.sampler.target_scores(logits[None])[0].softmax(-1)
        return float(entropy(probs)) / math.log(len(probs))


def _renumbered(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Parents of the kept nodes, as places among the kept ones."""
    place = {node: index for index, node in enumerate(kept)}
    return [ROOT if parents[node] == ROOT else place[parents[node]] for node in kept]
