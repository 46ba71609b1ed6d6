"""Drafters of the batched engine, which draft for many answers in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.engine.pair import Pair
from reprieve.models.cache import RowCache
from reprieve.models.cached_model import same_vocabulary
from reprieve.models.eagle3 import EagleHead
from reprieve.models.row_model import RowModel, Unread
from reprieve.models.sampling import Sampler, draw_at, keyed_uniforms
from reprieve.rules import Rule
from reprieve.transfers import device_tensor, to_device
from reprieve.types import HiddenStates, Need

DRAFT, ACCEPT, TARGET, NOISE = range(4)  # purposes of the draws at one position


@dataclass(frozen=True)
class RowInput:
    """Text of a row.

    Args:
        token_ids: prompt and answer so far; the target has read all but the last.
        num_new: number of last tokens that the drafter has not read, 1 to K + 1.
        seed: of its draws.
    """

    token_ids: list[int]
    num_new: int
    seed: int


FREE_ROW = RowInput([0], 1, 0)


@dataclass(frozen=True)
class RowBlock:
    """Drafted tokens of R rows of the caches; values in free rows are undefined."""

    token_ids: Tensor  # [R, K + 1], the last committed token and the drafted ones
    logits: Tensor | None = None  # [R, K, V], the draft's; None if nothing reads them
    hidden: HiddenStates | None = None  # [R, K, D] a layer, the draft's


class RowDrafter:
    """Drafts K tokens for each row. This class drafts none, for the target alone.

    Args:
        num_draft_tokens: K.
    """

    samples = False  # whether it draws its tokens
    target_layers: tuple[int, ...] = ()  # layers of the target whose states it observes
    models: tuple[RowModel, ...] = ()  # of its own
    caches: tuple[RowCache, ...] = ()  # of its own

    def __init__(self, num_draft_tokens: int = 0) -> None:
        self.num_draft_tokens = num_draft_tokens

    def read_prompts(self, unread: Sequence[Unread]) -> None:
        """Read prompts without their last token, after the target has read them."""
        return

    def observe_prompts(self, texts: Sequence[Unread], hidden: HiddenStates) -> None:
        """Observe the target's states of some prompts, [len(texts), n, D] a layer, padded at the end."""
        return

    def observe_block(self, hidden: HiddenStates) -> None:
        """Observe the target's states of a verified block, [R, K + 1, D] a layer."""
        return

    def reserve(self, length: int) -> None:
        """Make room for texts of `length` tokens."""
        for cache in self.caches:
            cache.reserve(length)

    def copy_row(self, source: int, to: int) -> None:
        """Copy what is cached of a text to another row."""
        for cache in self.caches:
            cache.copy_row(source, to)

    def can_draft(self, token_ids: Sequence[int]) -> bool:
        """Return True if the next block of a text counts."""
        return True

    def propose(self, texts: Sequence[RowInput], recent: Tensor, lengths: Tensor, longest: int) -> RowBlock:
        """Draft a block.

        Args:
            texts: of all R rows.
            recent: their last two tokens, [R, 2].
            lengths: their lengths, [R].
            longest: length of the longest, with K drafted tokens.
        """
        return RowBlock(recent[:, 1:])


def _read_probs(rules: Sequence[Rule]) -> bool:
    """Return whether a rule reads the draft's distributions."""
    return any(Need.DRAFT_PROBS in rule.traits.needs for rule in rules)


class DraftModelRows(RowDrafter):
    """Drafts with the pair's draft model. Blocks carry the logits and the hidden states that the rules read."""

    def __init__(
        self, pair: Pair, rules: Sequence[Rule], sampler: Sampler, *, num_rows: int, num_draft_tokens: int
    ) -> None:
        super().__init__(num_draft_tokens)
        assert pair.draft is not None
        layers = sorted({layer for rule in rules for layer in rule.traits.draft_layers})
        self.model = RowModel(pair.draft, num_rows, hidden_layers=layers)
        self.models = (self.model,)
        self.caches = (self.model.cache,)
        self.sampler = sampler
        self.samples = not sampler.draft_greedy
        self.vocab_size = pair.vocab_size
        self.keeps_logits = (self.samples and not sampler.greedy) or _read_probs(rules)

    def read_prompts(self, unread: Sequence[Unread]) -> None:
        self.model.prefill(unread)

    def propose(self, texts: Sequence[RowInput], recent: Tensor, lengths: Tensor, longest: int) -> RowBlock:
        chain = [recent[:, 1:]]
        kept: list[Tensor] = []
        states: dict[int, list[Tensor]] = {layer: [] for layer in self.model.hidden_layers}

        def keep_states(hidden: HiddenStates) -> None:
            for layer, part in hidden.items():
                states[layer].append(part[:, -1:].clone())

        seeds = device_tensor([text.seed for text in texts], torch.long, lengths.device) if self.samples else None
        # Always read the second-to-last token again: after a fully accepted block, the draft's cache lacks it.
        feed, positions = recent, (lengths[:, None] + torch.arange(-2, 0, device=lengths.device)).clamp_min(0)
        for step in range(self.num_draft_tokens):
            read, hidden = self.model.forward(feed, positions, longest=longest)
            # A copy, because the next forward overwrites the original.
            logits = same_vocabulary(read[:, -1].to(torch.float32, copy=True), self.vocab_size)
            if step:
                keep_states(hidden)
            if self.keeps_logits:
                kept.append(logits)
            feed = self._choose(logits, seeds, lengths + step)[:, None]
            chain.append(feed)
            positions = (lengths + step)[:, None]
        if states:  # the last drafted token is read only if its states are needed
            keep_states(self.model.forward(feed, positions, longest=longest)[1])
        hidden = {layer: torch.cat(parts, 1) for layer, parts in states.items()}
        return RowBlock(torch.cat(chain, 1), torch.stack(kept, 1) if kept else None, hidden)

    def _choose(self, logits: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
        """Return a token for each row from its logits, [R, V] to [R]; the most likely one without seeds."""
        if seeds is None:
            return logits.argmax(-1)
        return draw_at(self.sampler.draft_scores(logits).softmax(-1), keyed_uniforms(seeds, positions, DRAFT))


class EagleRows(RowDrafter):
    """Drafts chains with an EAGLE-3 head: its most likely tokens, not draws, as `EagleDrafter` with `top_k=1`.

    The head reads a token together with the target's state of the token before it, so it drafts nothing after a prompt
    of one token.

    Args:
        head: on the target's device.
    """

    def __init__(
        self, pair: Pair, rules: Sequence[Rule], head: EagleHead, *, num_rows: int, num_draft_tokens: int
    ) -> None:
        super().__init__(num_draft_tokens)
        self.head = head
        self.target_layers = head.layers_read
        self.vocab_size = pair.vocab_size
        self.keeps_logits = _read_probs(rules)
        weight = head.fc.weight
        self.device = weight.device
        self._target_ids = head.target_ids
        self._cache = RowCache(num_rows, head.config.layer.num_hidden_layers)
        self.caches = (self._cache,)
        shape = num_rows, num_draft_tokens + 1, len(weight)
        self._states = torch.zeros(shape, dtype=weight.dtype, device=self.device)  # before each new token of a row

    def observe_prompts(self, texts: Sequence[Unread], hidden: HiddenStates) -> None:
        states = self.head.fuse(hidden)
        rows = device_tensor([text.row for text in texts], torch.long, self.device)
        last = device_tensor([len(text.token_ids) - 1 for text in texts], torch.long, self.device)
        self._states[rows, 0] = states[torch.arange(len(texts), device=self.device), last]
        size = states.shape[1] - 1  # the head does not read the first token
        if size:
            padded = [(text.token_ids[1:] + [0] * size)[:size] for text in texts]
            positions = torch.arange(size, device=self.device).expand(len(texts), -1)
            self._read(to_device(torch.tensor(padded), self.device), states[:, :-1], positions, size, rows)

    def copy_row(self, source: int, to: int) -> None:
        super().copy_row(source, to)
        self._states[to] = self._states[source]

    def observe_block(self, hidden: HiddenStates) -> None:
        states = self.head.fuse(hidden)
        self._states[: len(states)] = states

    def can_draft(self, token_ids: Sequence[int]) -> bool:
        return len(token_ids) > 1

    def propose(self, texts: Sequence[RowInput], recent: Tensor, lengths: Tensor, longest: int) -> RowBlock:
        counts = [text.num_new for text in texts]
        size = max(counts)
        padded = [text.token_ids[-text.num_new :] + [0] * (size - text.num_new) for text in texts]
        new = device_tensor(counts, torch.long, self.device)
        # A token is at the head's position before its own. What padding writes is overwritten before it is read.
        first = (lengths - new - 1).clamp_min(0)
        positions = first[:, None] + torch.arange(size, device=self.device)
        feed, states = to_device(torch.tensor(padded), self.device), self._states[: len(texts), :size]
        logits, states = self._read(feed, states, positions, longest)
        rows = torch.arange(len(texts), device=self.device)
        logits, states = logits[rows, new - 1], states[rows, new - 1]
        chain, kept = [recent[:, 1:]], []
        for step in range(self.num_draft_tokens):
            if step:
                read, after = self._read(chain[-1], states[:, None], (lengths + step - 2)[:, None], longest)
                logits, states = read[:, 0], after[:, 0]
            chain.append(self._target_ids[logits.argmax(-1)][:, None])
            if self.keeps_logits:
                kept.append(self.head.whole_vocabulary(logits, self.vocab_size))
        return RowBlock(torch.cat(chain, 1), torch.stack(kept, 1) if kept else None)

    def _read(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, longest: int, rows: Tensor | int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the head's logits [R, n, draft_vocab_size] and states [R, n, D] after tokens [R, n]."""
        self._cache.place(rows, positions, longest)
        mask = self.head.additive_mask(positions[:, :, None] >= torch.arange(longest, device=self.device))
        read: tuple[Tensor, Tensor] = self.head(token_ids, states, cache=self._cache, positions=positions, mask=mask)
        return read
