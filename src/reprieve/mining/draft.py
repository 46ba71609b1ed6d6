"""Draft reader for miners: the draft's own token at every position of a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.models.cache import RollbackCache
from reprieve.models.cached_model import CachedModel, execution_device, shared_length
from reprieve.models.eagle3 import EagleHead
from reprieve.models.sampling import GumbelNoise, Sampler, gumbel_choice
from reprieve.transfers import spread

_AHEAD = 32  # tokens read at once
_MOST_LOGITS = 2**28  # logits per forward: a GiB in float32


class Draft(Protocol):
    """Finds the tokens of a response that the draft would not have chosen."""

    def mismatches(
        self, prompt_ids: list[int], response_ids: list[int], start: int = 0
    ) -> AsyncIterator[tuple[int, int]]:
        """Yield each position from `start` on where the draft's own token differs, and that token."""
        ...


class TextModel(Protocol):
    """The part of `CachedModel` that a `DraftReader` needs."""

    cached_ids: list[int]

    def keep(self, length: int) -> None: ...
    def forward(self, token_ids: list[int], *, num_rows: int | None = None) -> tuple[Tensor, Any]: ...


class EagleModel(TextModel):
    """EAGLE-3 head and its target as one `TextModel`, which predicts the first drafted token.

    Args:
        target: has its own cache and returns the hidden states of the head's layers.
        head: on the target's device.
        vocab_size: columns of the logits.
    """

    def __init__(self, target: CachedModel, head: EagleHead, vocab_size: int) -> None:
        self.target = target
        self.head = head
        self.vocab_size = vocab_size
        self.cached_ids = target.cached_ids
        self._cache = RollbackCache()
        self._states = torch.empty(0, head.fc.out_features, dtype=head.fc.weight.dtype, device=target.device)

    def keep(self, length: int) -> None:
        """Roll back to the first `length` tokens."""
        self.target.keep(length)
        self._cache.keep(max(0, length - 1))
        self._states = self._states[:length]

    def forward(self, token_ids: list[int], *, num_rows: int | None = None) -> tuple[Tensor, None]:
        """Append tokens; return the head's logits [n, V] after each; all -inf after a text's first token.

        Args:
            num_rows: return the last rows only; None for all.
        """
        before = len(self.cached_ids)
        prefill = self.target.start([*self.cached_ids, *token_ids], reuse_prefix=True)
        assert prefill.hidden is not None
        self._states = torch.cat([self._states, self.head.fuse(prefill.hidden)])
        first = max(1, before)  # the head reads a token with the state of the one before
        num_rows = len(token_ids) if num_rows is None else num_rows
        logits = torch.full((num_rows, self.vocab_size), -torch.inf, device=self.target.device)
        if unread := token_ids[first - before :]:
            tokens = spread(unread, torch.long, self.target.device)
            read, _ = self.head.read(tokens, self._states[first - 1 : -1], cache=self._cache, num_cached=first - 1)
            known = read[-num_rows:]
            logits[num_rows - len(known) :, self.head.target_ids] = known
        return logits, None


class DraftReader(Draft):
    """Reads one problem's responses a few tokens ahead; common prefixes are read once.

    A swap changes the rest of the response, so tokens far beyond the next mismatch are not read in advance.

    Args:
        model: the draft, or an `EagleModel`, with its own cache.
        sampler: temperature, top-k and top-p.
        noise: makes sampling repeatable; None when greedy.
    """

    def __init__(self, model: TextModel, sampler: Sampler, noise: GumbelNoise | None = None) -> None:
        self.model = model
        self.sampler = sampler
        self.noise = noise
        self._predicted: list[int] = []  # next token after each cached one, from the prompt's last

    async def mismatches(
        self, prompt_ids: list[int], response_ids: list[int], start: int = 0
    ) -> AsyncIterator[tuple[int, int]]:
        """See `Draft.mismatches`."""
        for first in range(start, len(response_ids), _AHEAD):
            known = response_ids[: first + _AHEAD]
            for position, token in _differing(known, self.predict(prompt_ids, known), first):
                yield position, token

    @torch.inference_mode()
    def predict(self, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
        """Return the draft's own token at every position of the response, given the response before it."""
        text = [*prompt_ids, *response_ids]
        first = len(prompt_ids) - 1
        shared = min(shared_length(text[:-1], self.model.cached_ids), first + len(self._predicted))
        if shared <= first:
            self._read_prompt(prompt_ids[:-1])
            shared, self._predicted = first, []
        self.model.keep(shared)
        del self._predicted[shared - first :]
        if shared < len(text) - 1:
            logits, _ = self.model.forward(text[shared:-1])
            self._predicted += self._choose(logits, text, shared)
        return self._predicted[: len(response_ids)]

    def _read_prompt(self, token_ids: list[int]) -> None:
        shared = shared_length(token_ids, self.model.cached_ids)
        self.model.keep(shared)
        if shared < len(token_ids):
            self.model.forward(token_ids[shared:], num_rows=1)

    def _choose(self, logits: torch.Tensor, text: list[int], shared: int) -> list[int]:
        scores = self.sampler.target_scores(logits)
        if self.noise is None:
            return scores.argmax(-1).tolist()
        return gumbel_choice(scores, self.noise.keys(text[:-1], shared + 1)).tolist()


@dataclass(eq=False)
class _Read:
    text: list[int]
    first: int  # first position whose next token is needed
    done: asyncio.Future[list[int]]


class BatchedDraft(Draft):
    """Draft that batches the responses of all problems in flight; greedy only. For accelerators, with a served target.

    Whole texts are read without a cache: on an accelerator, one forward over many texts costs less than many
    forwards over their suffixes.

    Args:
        model: the draft.
        vocab_size: tokens of the target; the draft may have more columns.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.num_forwards = 0
        self._waiting: list[_Read] = []
        self._serving: asyncio.Task[None] | None = None

    async def mismatches(
        self, prompt_ids: list[int], response_ids: list[int], start: int = 0
    ) -> AsyncIterator[tuple[int, int]]:
        """See `Draft.mismatches`."""
        for position, token in _differing(response_ids, await self.predict(prompt_ids, response_ids), start):
            yield position, token

    async def predict(self, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
        """Return the draft's own token at every position of the response, given the response before it."""
        if not response_ids:
            return []
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Read([*prompt_ids, *response_ids[:-1]], len(prompt_ids) - 1, done))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await done

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let all ready problems enqueue their texts
            batch = self._next_batch()
            try:
                predicted = await asyncio.to_thread(self._read, batch)
            except Exception as error:  # a failed forward fails its texts
                for read in batch:
                    _settle(read.done, error)
                continue
            for read, tokens in zip(batch, predicted, strict=True):
                _settle(read.done, tokens)

    def _next_batch(self) -> list[_Read]:
        """Return the longest-waiting texts that fit into one forward, at least one."""
        batch: list[_Read] = []
        longest = 0
        while self._waiting:
            longest = max(longest, len(self._waiting[0].text))
            if batch and longest * (len(batch) + 1) * self.vocab_size > _MOST_LOGITS:
                break
            batch.append(self._waiting.pop(0))
        return batch

    @torch.inference_mode()
    def _read(self, batch: list[_Read]) -> list[list[int]]:
        size = max(len(read.text) for read in batch)
        rows = [read.text + [0] * (size - len(read.text)) for read in batch]  # causal attention hides the padding
        logits = self.model(input_ids=torch.tensor(rows, device=execution_device(self.model)), use_cache=False).logits
        best = logits[..., : self.vocab_size].argmax(-1).tolist()
        self.num_forwards += 1
        return [row[read.first : len(read.text)] for row, read in zip(best, batch, strict=True)]


def _differing(response: list[int], predicted: list[int], start: int) -> list[tuple[int, int]]:
    return [(at, predicted[at]) for at in range(start, len(response)) if response[at] != predicted[at]]


def _settle(done: asyncio.Future[list[int]], result: list[int] | Exception) -> None:
    if done.done():  # its problem was cancelled
        return
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
