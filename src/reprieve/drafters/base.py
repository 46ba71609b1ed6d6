"""Drafter interface. The engine knows drafters only through this protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from reprieve.drafters.length import DraftLength, RoundLength
from reprieve.models.cached_model import StepCosts
from reprieve.models.int8 import num_weights
from reprieve.models.loading import ModelPair
from reprieve.models.sampling import Sampler
from reprieve.rules import Rule
from reprieve.specs import Registry
from reprieve.types import Block, Need, Outcome, Prefill, Verification

# Cost of verifying one more token, in target forwards. On a CPU, large targets are bound by arithmetic: 1.5B
# parameters take 0.12 in int8 and 0.22 in float32 (docs/measured/real_pair.md).
_VERIFY, _VERIFY_LARGE = 0.03, 0.15
_LARGE = 100_000_000  # parameters


class Drafter(Protocol):
    """Proposes a block after the committed tokens and learns the outcome.

    The engine calls `start` first, then alternates `propose` and `commit`. It calls `commit` for every round, with the
    committed tokens; no model has read the last one yet.

    Attributes:
        target_layers: layers of the target whose hidden states it reads, in the prefill and in every verification.
        drafts_trees: True if its blocks may branch.
        provides: subset of `Need.DRAFT_PROBS` and `Need.DRAFT_HIDDEN` that its blocks carry.
    """

    name: str
    target_layers: tuple[int, ...] = ()
    drafts_trees: bool = False
    provides: frozenset[Need] = frozenset()

    def share_prefix(self, token_ids: Sequence[int]) -> None:
        """Set a prefix that most prompts share; the drafter may read it once for all of them."""
        return

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        """Reset and start a prompt. With `target_layers`, the target has already read all of it but the last token."""
        ...

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        """Return a block of depth at most `max_depth` (0 or more); it may be empty.

        Args:
            length: token-by-token drafters call its `should_continue` after each token.
        """
        ...

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        """Keep the accepted path, drop the rest, and add the fallback or bonus token."""
        ...


class NoDrafter(Drafter):
    """Proposes nothing: every round is one plain target step, so target-only decoding uses the same loop."""

    name = "none"
    provides = frozenset({Need.DRAFT_PROBS, Need.DRAFT_HIDDEN})  # no tokens, so no rule lacks an input

    def __init__(self, device: torch.device) -> None:
        self._empty = Block.empty(device)

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None: ...

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        return self._empty

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None: ...


class DrafterSettings(ABC):
    """Parameters of a drafter specification such as `ngram:max_ngram=3`: a frozen dataclass that loads no model."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, pair: ModelPair, rule: Rule, length: DraftLength) -> Drafter:
        """Return a drafter for one decoder.

        Args:
            rule, length: their needs for the draft's states must be met.

        Raises:
            PairError: the pair lacks a required model.
        """

    @property
    def drafts_trees(self) -> bool:
        """True if its blocks may branch."""
        return False

    def costs(self, pair: ModelPair, measured: StepCosts | None = None) -> StepCosts:
        """Return the costs of a round, estimated from the models' sizes where they are not measured."""
        if measured is not None:
            return StepCosts(self.draft_cost(pair, measured), measured.verify)
        large = pair.device.type == "cpu" and num_weights(pair.target) > _LARGE
        return StepCosts(self.draft_cost(pair, None), _VERIFY_LARGE if large else _VERIFY)

    def draft_cost(self, pair: ModelPair, measured: StepCosts | None) -> float:
        """Return the cost of a drafted token, or of a tree level, in target forwards.

        Args:
            measured: with the draft model; None to estimate.
        """
        return 0.0

    def fingerprints(self, pair: ModelPair) -> dict[str, str]:
        """Return fingerprints of the drafter's own weights, by name; empty if it only uses the pair's."""
        return {}


DRAFTERS: Registry[DrafterSettings] = Registry("drafter", "reprieve.drafters")
register_drafter = DRAFTERS.register
