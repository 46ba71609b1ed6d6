"""Drafting with a small language model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.drafters.base import DrafterSettings, register_drafter
from reprieve.models.cached_model import CachedModel
from reprieve.models.loading import ModelPair
from reprieve.models.sampling import Sampler
from reprieve.needs import Need
from reprieve.rules import Rule
from reprieve.types import Block, HiddenStates, Outcome, Prefill, Verification, select_rows


@register_drafter
@dataclass(frozen=True)
class DraftModelSettings(DrafterSettings):
    """The pair's own draft."""

    name = "draft"

    def build(self, pair: ModelPair, rule: Rule) -> DraftModelDrafter:
        return DraftModelDrafter(pair.cached_draft(rule.traits.draft_layers), pair.device)


class DraftModelDrafter:
    """Chains from a draft model that shares the target's tokenizer.

    Args:
        model: the draft, with its own cache.
        device: where the target wants the block.
    """

    name = "draft"
    target_layers: tuple[int, ...] = ()
    drafts_trees = False

    def __init__(self, model: CachedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.provides = frozenset({Need.DRAFT_PROBS, Need.DRAFT_HIDDEN} if model.hidden_layers else {Need.DRAFT_PROBS})
        self._unread: list[int] = []  # committed, not yet in the draft's cache
        self._base = 0

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        self.sampler = sampler
        self.model.require_room(
            len(prompt_ids) + sampler.params.max_new_tokens, what="prompt and new tokens, read by the draft,"
        )
        self.model.start(prompt_ids[:-1])
        self._unread = [prompt_ids[-1]]

    def propose(self, max_depth: int) -> Block:
        """A chain; every token is fed on as it comes, so that the host waits for none of them."""
        if max_depth < 1:
            return Block.empty(self.device)
        token_ids: list[Tensor] = []
        rows = []
        hidden_rows = []
        self._base = self.model.length + len(self._unread)
        feed: Sequence[int] | Tensor = self._unread
        for _ in range(max_depth):
            logits, hidden = self.model.forward(feed)
            rows.append(logits[-1:])
            if hidden is not None and token_ids:
                hidden_rows.append(select_rows(hidden, slice(-1, None)))
            feed = self.sampler.draft_token(logits[-1:]).to(logits.device)
            token_ids.append(feed)
        self._unread = []
        if self.model.hidden_layers:  # the last drafted token is encoded only where its hidden state is wanted
            _, hidden = self.model.forward(feed)
            hidden_rows.append(select_rows(hidden, slice(-1, None)))
        return Block.chain(
            torch.cat(token_ids).to(self.device),
            draft_logits=torch.cat(rows).to(self.device),
            draft_hidden=self._stack(hidden_rows) if hidden_rows else None,
            deterministic=self.sampler.draft_greedy,
        )

    def _stack(self, rows: list[HiddenStates | None]) -> HiddenStates:
        return {
            layer: torch.cat([row[layer] for row in rows if row is not None]).to(self.device)
            for layer in self.model.hidden_layers
        }

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        if not block.num_tokens:
            self._unread.append(outcome.next_token_id)
            return
        accepted = outcome.token_ids
        self.model.keep(self._base + len(accepted))
        self.model.learn(self._base, accepted)
        missing = self._base + len(accepted) - self.model.length  # 1 when the whole block was accepted
        self._unread = [*accepted[len(accepted) - missing :], outcome.next_token_id]
