"""EAGLE-3 drafting: dynamic trees (EAGLE-2, arXiv 2406.16858) from the target's hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.bundles import bundle_of
from reprieve.drafters.base import Drafter, DrafterSettings, register_drafter
from reprieve.drafters.length import DraftLength, RoundLength, TreeLength
from reprieve.drafters.pruning import PARAMETERS, Pruning
from reprieve.errors import SpecError, require_choice
from reprieve.models.cache import RollbackCache
from reprieve.models.cached_model import StepCosts
from reprieve.models.eagle3 import EagleHead
from reprieve.models.loading import ModelPair
from reprieve.models.sampling import Sampler
from reprieve.rules import Rule
from reprieve.rules.distributions import entropy
from reprieve.transfers import device_tensor, to_host
from reprieve.types import ROOT, Block, HiddenStates, Need, Outcome, Prefill, Verification

MAX_NODES = 512
_CUTS = tuple(dict.fromkeys(name for names in PARAMETERS.values() for name in names))


@register_drafter
@dataclass(frozen=True)
class EagleSettings(DrafterSettings):
    """EAGLE-3 head and the shape of its trees.

    Args:
        path: folder or hub id of the head, in the speculators format; None for a bundled target's own.
        depth: maximum depth of a tree, 1 to 512; `top_k` and `total_tokens` have the same range.
        top_k: nodes expanded at each level, and children of each; 1 drafts a chain.
        total_tokens: maximum number of nodes; those with the highest joint probability are kept.
        prune: pruning of trees before verification (`Pruning.strategy`); None for no pruning. Its parameters are
            `epsilon`, `budget`, `entropy_weight`, `leaf`, `keep` and `alpha`; None uses their defaults.
    """

    name = "eagle3"

    path: str | None = None
    depth: int = 6
    top_k: int = 8
    total_tokens: int = 32
    prune: str | None = None
    epsilon: float | None = None
    budget: float | None = None
    entropy_weight: float | None = None
    leaf: float | None = None
    keep: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "total_tokens"):
            if not 1 <= getattr(self, name) <= MAX_NODES:
                raise SpecError(f"{name} must be in [1, {MAX_NODES}], got {getattr(self, name)!r}")
        _ = self.pruning

    @property
    def pruning(self) -> Pruning | None:
        """Return the pruning of these settings.

        Raises:
            SpecError: an unknown strategy, or a parameter that does not belong to it.
        """
        cuts = {name: getattr(self, name) for name in _CUTS if getattr(self, name) is not None}
        if self.prune is None:
            if cuts:
                raise SpecError(f"drafter eagle3: {min(cuts)} goes with prune=, one of {', '.join(PARAMETERS)}")
            return None
        require_choice("prune", self.prune, tuple(PARAMETERS))
        if odd := sorted(cuts.keys() - set(PARAMETERS[self.prune])):
            raise SpecError(f"prune={self.prune} takes {', '.join(PARAMETERS[self.prune])}, not {odd[0]}")
        return Pruning(self.prune, **cuts)

    def source(self, target: str) -> str:
        """Return the path of the head for a target.

        Raises:
            SpecError: no path, and the target has no bundled head.
        """
        bundle = bundle_of(target)
        source = self.path or ({} if bundle is None else bundle.heads).get(self.name)
        if source is None:
            raise SpecError(f"drafter eagle3 needs path=FOLDER: target {target!r} has no head of its own")
        return source

    def build(self, pair: ModelPair, rule: Rule, length: DraftLength) -> EagleDrafter:
        head, wanted = pair.eagle_head(self.source(pair.target_name)), Need.DRAFT_PROBS in rule.traits.needs
        return EagleDrafter(head, vocab_size=pair.vocab_size, settings=self, keep_logits=wanted)

    @property
    def drafts_trees(self) -> bool:
        return self.top_k > 1

    def draft_cost(self, pair: ModelPair, measured: StepCosts | None) -> float:
        """See `DrafterSettings`. Always estimated: a head is one layer."""
        return 1 / int(pair.target.config.get_text_config().num_hidden_layers)

    def fingerprints(self, pair: ModelPair) -> dict[str, str]:
        source = self.source(pair.target_name)
        return {source: pair.eagle_head(source).fingerprint}


@dataclass
class _Tree:
    """Candidates so far, on the device: one tensor per level, joined at the end.

    `parents` are indices of candidates, or ROOT. Every expanded node has the same number of children, in order.
    """

    token_ids: list[Tensor]
    parents: list[Tensor]
    log_probs: list[Tensor]  # of the path from the root
    logits: list[Tensor]  # [n, draft_vocab_size], of the expanded nodes

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.token_ids))


class EagleDrafter(Drafter):
    """Proposes a tree, or a chain, from the states of the token before the last committed one.

    The children of a node are the head's most likely tokens, not draws. The block is therefore deterministic, and the
    lossless check accepts a child with the target's own probability.

    Args:
        head: on the target's device; drafters may share it.
        vocab_size: columns of the target's logits.
        settings: size and pruning of the tree; its `path` is ignored.
        keep_logits: let blocks carry the logits that proposed each node, over the whole vocabulary.
    """

    name = "eagle3"
    provides = frozenset({Need.DRAFT_PROBS})

    def __init__(
        self, head: EagleHead, *, vocab_size: int, settings: EagleSettings | None = None, keep_logits: bool = True
    ) -> None:
        self.head = head
        self.keep_logits = keep_logits
        self.vocab_size = vocab_size
        self.shape = settings or EagleSettings()
        self.pruning = self.shape.pruning
        self.device = head.fc.weight.device
        self.target_layers = head.layers_read
        self.drafts_trees = self.shape.drafts_trees
        self._target_ids = head.target_ids
        self._num_children = min(self.shape.top_k, len(self._target_ids))
        self._cache = RollbackCache()
        self._length = 0  # cached tokens, without drafted ones
        self._unread: list[int] = []  # committed tokens the head has not read
        self._states: list[Tensor] = []  # the fused states before them

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        self.sampler = sampler
        self._cache.truncate(0)
        self._length = 0
        self._unread = list(prompt_ids[1:])
        self._states = [] if prefill.hidden is None else [self.head.fuse(prefill.hidden)]
        self._root_entropy = self._entropy(prefill.logits)

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        depth = min(max_depth, self.shape.depth)
        if depth < 1 or not self._states:
            return Block.empty(self.device)
        policy = length if isinstance(length, TreeLength) else None
        logits, states = self._read_committed()
        tree = _Tree([], [], [], [])
        root = torch.full((1,), ROOT, device=self.device)
        self._expand(tree, root, torch.zeros(1, device=self.device), logits[None])
        ancestors = torch.empty(1, 0, dtype=torch.bool, device=self.device)  # of the last frontier: expanded nodes
        parent_states = states[None]
        for level in range(1, depth):
            frontier, parent = self._frontier(tree)
            if policy and not policy.level_pays(float(tree.log_probs[-1][frontier].exp().sum())):
                break
            own = torch.eye(len(frontier), dtype=torch.bool, device=self.device)
            ancestors = torch.cat([ancestors[parent], own], dim=1)
            predicted, parent_states = self.head(
                tree.token_ids[-1][frontier],
                parent_states[parent],
                cache=self._cache,
                positions=torch.full((len(frontier),), self._length + level - 1, device=self.device),
                mask=self._tree_mask(ancestors),
            )
            nodes = frontier + tree.num_nodes - len(tree.token_ids[-1])
            self._expand(tree, nodes, tree.log_probs[-1][frontier], predicted)
        self._cache.truncate(self._length)
        return self._block(tree, policy)

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        rows = device_tensor([0, *(node + 1 for node in outcome.path)], torch.long, self.device)
        assert verification.hidden is not None, "the engine asks the target for the layers a drafter reads"
        taken: HiddenStates = {layer: verification.hidden[layer][rows] for layer in self.target_layers}
        self._unread += outcome.committed_ids
        self._states.append(self.head.fuse(taken))
        self._root_entropy = self._entropy(verification.logits[rows[-1:]][0])

    def _read_committed(self) -> tuple[Tensor, Tensor]:
        """Read the committed tokens with the target's states; return the head's logits and state after them."""
        tokens = device_tensor(self._unread, torch.long, self.device)
        logits, states = self.head.read(tokens, torch.cat(self._states), cache=self._cache, num_cached=self._length)
        self._length += len(self._unread)
        self._unread, self._states = [], []
        return logits[-1], states[-1]

    def _expand(self, tree: _Tree, nodes: Tensor, log_probs: Tensor, logits: Tensor) -> None:
        """Add the most likely children of n nodes as a level; `logits` [n, draft_vocab_size] follow the nodes."""
        best = logits.log_softmax(-1).clamp_max(0).topk(self._num_children, dim=-1)
        tree.logits.append(logits)
        tree.token_ids.append(self._target_ids[best.indices].flatten())
        tree.parents.append(nodes.repeat_interleave(self._num_children))
        tree.log_probs.append((log_probs[:, None] + best.values).flatten())

    def _frontier(self, tree: _Tree) -> tuple[Tensor, Tensor]:
        """Return the last level's nodes to expand, in drafting order, and the parent index of each."""
        best = tree.log_probs[-1].sort(descending=True, stable=True).indices[: self.shape.top_k]
        frontier = best.sort().values
        return frontier, frontier // self._num_children

    def _block(self, tree: _Tree, policy: TreeLength | None) -> Block:
        """Return the candidates of largest joint probability, pruned, with the logits that proposed each."""
        log_probs, all_parents = torch.cat(tree.log_probs), torch.cat(tree.parents)
        # A child is never more likely than its parent and comes later, so a stable sort keeps parents first.
        order = log_probs.sort(descending=True, stable=True).indices
        chosen = order[: self.shape.total_tokens].sort().values
        new_index = torch.full_like(all_parents, ROOT)
        new_index[chosen] = torch.arange(len(chosen), device=self.device)
        renumbered = torch.where(all_parents == ROOT, ROOT, new_index[all_parents])[chosen]
        fetched = to_host(renumbered, log_probs[chosen], self._root_entropy)
        parents = [int(parent) for parent in fetched[0]]
        kept = list(range(len(parents)))
        if policy is not None:
            least = math.log(policy.least())
            kept = [node for node in kept if fetched[1][node] >= least] or [0]
        num_pruned = 0
        if self.pruning is not None:
            wanted = set(self.pruning.kept(parents, fetched[1], fetched[2][0]))
            num_pruned = len(parents) - len(wanted)
            kept = [node for node in kept if node in wanted] or [0]
        if policy is not None:
            policy.expect(sum(math.exp(fetched[1][node]) for node in kept))
        if len(kept) < len(parents):
            parents = _renumbered(parents, kept)
            chosen = chosen[device_tensor(kept, torch.long, self.device)]
        logits = None
        if self.keep_logits:
            logits = self.head.whole_vocabulary(torch.cat(tree.logits)[chosen // self._num_children], self.vocab_size)
        return Block(
            torch.cat(tree.token_ids)[chosen],
            tuple(parents),
            draft_logits=logits,
            deterministic=True,
            num_pruned=num_pruned,
        )

    def _tree_mask(self, ancestors: Tensor) -> Tensor:
        """Return the mask of the last nodes: each attends to the committed text, its drafted ancestors and itself."""
        text = torch.ones(len(ancestors), self._length, dtype=torch.bool, device=self.device)
        return self.head.additive_mask(torch.cat([text, ancestors], dim=1))

    def _entropy(self, logits: Tensor | None) -> Tensor:
        """Return the normalised entropy of the target's distribution [V] at the root: [] (ARC-Decode, Eq. 2)."""
        if self.pruning is None or logits is None:
            return torch.ones((), device=self.device)
        probs = self.sampler.target_scores(logits[None])[0].softmax(-1)
        return entropy(probs) / math.log(len(probs))


def _renumbered(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return the parents of the kept nodes, as indices of kept nodes."""
    new_index = {node: index for index, node in enumerate(kept)}
    return [ROOT if parents[node] == ROOT else new_index[parents[node]] for node in kept]
