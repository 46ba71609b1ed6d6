"""What proposes tokens. The engine knows drafters only through this protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from reprieve.models.sampling import Sampler
from reprieve.types import Block, Outcome, Prefill, Verification


class Drafter(Protocol):
    """Proposes a block after the committed tokens, and is told what became of it.

    `start` comes first; then `propose` and `commit` in turns. The engine calls `commit` for every round, with the
    tokens it committed, the last of which no model has read yet.
    """

    name: str
    drafts_trees: bool  # whether its blocks may branch
    provides: frozenset[str]  # which of `draft_probs` and `draft_hidden` its blocks carry

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads, in the prefill and in every verification."""
        ...

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        """Get ready for a prompt, all but whose last token the target has read; forget the last one."""
        ...

    def propose(self, max_depth: int) -> Block:
        """A block at most `max_depth` tokens deep (0 or more); it may be empty."""
        ...

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        """Keep the accepted path, drop the rest, take the fallback or bonus token."""
        ...
