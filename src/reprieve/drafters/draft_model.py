"""Drafting with a small language model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.drafters.base import Drafter, DrafterSettings, register_drafter
from reprieve.drafters.length import DraftLength, RoundLength
from reprieve.models.cached_model import CachedModel, HiddenLayers, StepCosts, require_positions
from reprieve.models.int8 import num_weights
from reprieve.models.loading import ModelPair
from reprieve.models.sampling import Sampler
from reprieve.rules import Rule
from reprieve.types import Block, HiddenStates, Need, Outcome, Prefill, Verification

LAST = -1  # layer, after the final norm


@register_drafter
@dataclass(frozen=True)
class DraftModelSettings(DrafterSettings):
    """Draft model of the pair."""

    name = "draft"

    def build(self, pair: ModelPair, rule: Rule, length: DraftLength) -> DraftModelDrafter:
        layers = rule.traits.draft_layers
        read = dict.fromkeys((*layers, LAST)) if length.reads_states else layers
        draft, wanted = pair.cached_draft(tuple(read)), Need.DRAFT_PROBS in rule.traits.needs
        return DraftModelDrafter(draft, pair.device, hidden_layers=layers, keep_logits=wanted)

    def draft_cost(self, pair: ModelPair, measured: StepCosts | None) -> float:
        """See `DrafterSettings`. Estimate: the ratio of weights; off the CPU, at least that of layers."""
        if measured is not None:
            return measured.draft
        if pair.draft is None:
            return 0.0
        draft, target = pair.draft, pair.target
        weights = num_weights(draft) / num_weights(target)
        if pair.device.type == "cpu":
            return weights
        layers = [int(model.config.get_text_config().num_hidden_layers) for model in (draft, target)]
        return max(layers[0] / layers[1], weights)


class DraftModelDrafter(Drafter):
    """Chains from a draft model that shares the target's tokenizer.

    Args:
        model: the draft, with its own cache.
        device: device of the returned blocks.
        hidden_layers: layers whose states the blocks carry; None for all that the model returns.
        keep_logits: keep the draft's logits in blocks even if no token was sampled from them.
    """

    name = "draft"

    def __init__(
        self,
        model: CachedModel,
        device: torch.device,
        *,
        hidden_layers: HiddenLayers | None = None,
        keep_logits: bool = True,
    ) -> None:
        self.model = model
        self.device = device
        self.keep_logits = keep_logits
        self.hidden_layers = model.hidden_layers if hidden_layers is None else hidden_layers
        self.provides = frozenset({Need.DRAFT_PROBS, Need.DRAFT_HIDDEN} if self.hidden_layers else {Need.DRAFT_PROBS})
        self._unread: list[int] = []  # committed tokens that are not yet in the draft's cache
        self._base = 0

    def share_prefix(self, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self.model.share_prefix(token_ids)

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        self.sampler = sampler
        num_positions = len(prompt_ids) + sampler.params.max_new_tokens
        require_positions(self.model.model, num_positions, what="prompt and new tokens, read by the draft,")
        self._unread = self.model.restart(prompt_ids)

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        """Draft a chain. Tokens stay on the device, so the host only waits for those that `length` reads.

        A sampled token stays in the chain whatever `length` decides after it, so the lossless check preserves the
        target's distribution at every chain length.
        """
        if max_depth < 1:
            return Block.empty(self.device)
        token_ids: list[Tensor] = []
        rows = []
        hidden_rows = []
        self._base = self.model.length + len(self._unread)
        feed: Sequence[int] | Tensor = self._unread
        while len(token_ids) < max_depth:
            logits, hidden = self.model.forward(feed, num_rows=1)
            if self.keep_logits or not self.sampler.draft_greedy:
                rows.append(logits)
            if self.hidden_layers and token_ids:
                hidden_rows.append(hidden)
            feed = self.sampler.draft_token(logits).to(logits.device)
            token_ids.append(feed)
            state = None if hidden is None else hidden.get(LAST)
            if len(token_ids) < max_depth and not length.should_continue(state, logits, feed):
                break
        self._unread = []
        if self.hidden_layers:  # the last drafted token is encoded only if its hidden state is needed
            hidden_rows.append(self.model.forward(feed)[1])
        return Block.chain(
            torch.cat(token_ids).to(self.device),
            draft_logits=torch.cat(rows).to(self.device) if rows else None,
            draft_hidden=self._stack(hidden_rows) if hidden_rows else None,
            deterministic=self.sampler.draft_greedy,
        )

    def _stack(self, rows: list[HiddenStates | None]) -> HiddenStates:
        return {
            layer: torch.cat([row[layer] for row in rows if row is not None]).to(self.device)
            for layer in self.hidden_layers
        }

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        if not block.num_tokens:
            self._unread.append(outcome.next_token_id)
            return
        accepted = outcome.token_ids
        self.model.truncate(self._base + len(accepted))
        self.model.record_ids(self._base, accepted)
        missing = self._base + len(accepted) - self.model.length  # 1 when the whole block was accepted
        self._unread = [*accepted[len(accepted) - missing :], outcome.next_token_id]
