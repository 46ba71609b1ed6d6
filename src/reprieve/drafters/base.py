"""What proposes tokens. The engine knows drafters only through this protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from reprieve.drafters.length import DraftLength, RoundLength
from reprieve.models.loading import ModelPair
from reprieve.models.sampling import Sampler
from reprieve.needs import Need
from reprieve.registry import Registry
from reprieve.rules import Rule
from reprieve.types import Block, Outcome, Prefill, Verification


class Drafter(Protocol):
    """Proposes a block after the committed tokens, and learns what became of it.

    `start` comes first; then `propose` and `commit` in turns. The engine calls `commit` for every round, with the
    tokens it committed, the last of which no model has read yet.
    """

    name: str
    drafts_trees: bool  # whether its blocks may branch
    provides: frozenset[Need]  # which of `Need.DRAFT_PROBS` and `Need.DRAFT_HIDDEN` its blocks carry

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads, in the prefill and in every verification."""
        ...

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        """Get ready for a prompt, all but whose last token the target has read; forget the last one."""
        ...

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        """A block at most `max_depth` tokens deep (0 or more); it may be empty.

        Args:
            length: drafters that go token by token ask it after each whether to go on.
        """
        ...

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        """Keep the accepted path, drop the rest, take the fallback or bonus token."""
        ...


class DrafterSettings(ABC):
    """A drafter as a specification names it, such as `ngram:max_ngram=3`: a frozen dataclass; no model is loaded."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, pair: ModelPair, rule: Rule, length: DraftLength) -> Drafter:
        """A drafter of its own for one decoder.

        Args:
            rule, length: whose needs of the draft's states it is to meet.

        Raises:
            PairError: the pair lacks what it takes.
        """

    @property
    def drafts_trees(self) -> bool:
        """Whether its blocks may branch."""
        return False

    def cost(self, pair: ModelPair) -> float:
        """What a drafted token, or a level, takes in target forwards: a rough guess, from sizes alone."""
        return 0.0

    def fingerprints(self, pair: ModelPair) -> dict[str, str]:
        """What identifies the weights it brings with it, by name; nothing for those of the pair itself."""
        return {}


DRAFTERS: Registry[DrafterSettings] = Registry("drafter", "reprieve.drafters")
register_drafter = DRAFTERS.register
