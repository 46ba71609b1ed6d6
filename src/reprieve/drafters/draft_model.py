"""Drafting with a small language model, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import Sampler
from reprieve.types import Block, HiddenStates, Outcome, Prefill, Verification


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
        self.provides = frozenset({"draft_probs", "draft_hidden"} if model.hidden_layers else {"draft_probs"})
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
        if max_depth < 1:
            return Block.empty(self.device)
        token_ids: list[int] = []
        rows = []
        hidden_rows = []
        self._base = self.model.length + len(self._unread)
        feed = self._unread
        for _ in range(max_depth):
            logits, hidden = self.model.forward(feed)
            rows.append(logits[-1])
            if hidden is not None and token_ids:
                hidden_rows.append(_last_row(hidden))
            token_ids.append(self.sampler.draft_token(logits[-1]))
            feed = token_ids[-1:]
        self._unread = []
        if self.model.hidden_layers:  # the last drafted token is encoded only where its hidden state is wanted
            _, hidden = self.model.forward(feed)
            assert hidden is not None
            hidden_rows.append(_last_row(hidden))
        return Block.chain(
            torch.tensor(token_ids, device=self.device),
            draft_logits=torch.stack(rows).to(self.device),
            draft_hidden=self._stack(hidden_rows) if hidden_rows else None,
            deterministic=self.sampler.draft_greedy,
        )

    def _stack(self, rows: list[HiddenStates]) -> HiddenStates:
        return {layer: torch.stack([row[layer] for row in rows]).to(self.device) for layer in self.model.hidden_layers}

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        if not block.num_tokens:
            self._unread.append(outcome.next_token_id)
            return
        accepted = block.token_ids[: len(outcome.path)].tolist()
        self.model.keep(self._base + len(accepted))
        missing = self._base + len(accepted) - self.model.length  # 1 when the whole block was accepted
        self._unread = [*accepted[len(accepted) - missing :], outcome.next_token_id]


def _last_row(hidden: HiddenStates) -> HiddenStates:
    return {layer: states[-1] for layer, states in hidden.items()}
