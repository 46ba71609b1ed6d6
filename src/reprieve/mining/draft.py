"""The draft as miners see it: what it would have put at every place of a response."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from reprieve.models.cached_model import CachedModel, execution_device, shared_length
from reprieve.models.draws import GumbelNoise, gumbel_choice
from reprieve.models.sampling import Sampler

_MOST_LOGITS = 2**28  # numbers that one forward may give: a GiB in float32


class Draft(Protocol):
    """Says what the draft would have put at every place of a response."""

    async def predict(self, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
        """The draft's own token at every place of the response, given the response before it."""
        ...


class DraftReader(Draft):
    """Reads one problem's responses in parallel forwards; what two of them share is read once.

    Args:
        model: the draft, with a cache of its own.
        sampler: temperature, top-k and top-p.
        noise: makes sampling repeatable; None when greedy.
    """

    def __init__(self, model: CachedModel, sampler: Sampler, noise: GumbelNoise | None = None) -> None:
        self.model = model
        self.sampler = sampler
        self.noise = noise
        self._predicted: list[int] = []  # after each cached token from the prompt's last on

    @torch.inference_mode()
    async def predict(self, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
        """See `Draft`."""
        text = [*prompt_ids, *response_ids]
        first = len(prompt_ids) - 1
        shared = min(shared_length(text[:-1], self.model.cached_ids), first + len(self._predicted))
        if shared <= first:
            self.model.start(prompt_ids[:-1], reuse_prefix=True)
            shared, self._predicted = first, []
        self.model.keep(shared)
        del self._predicted[shared - first :]
        if shared < len(text) - 1:
            logits, _ = self.model.forward(text[shared:-1])
            self._predicted += self._choose(logits, text, shared)
        return self._predicted[: len(response_ids)]

    def _choose(self, logits: torch.Tensor, text: list[int], shared: int) -> list[int]:
        scores = self.sampler.target_scores(logits)
        if self.noise is None:
            return scores.argmax(-1).tolist()
        return gumbel_choice(scores, self.noise.keys(text[:-1], shared + 1)).tolist()


@dataclass(eq=False)
class _Read:
    text: list[int]
    first: int  # the place whose next token is wanted first
    done: asyncio.Future[list[int]]


class BatchedDraft(Draft):
    """Reads the responses of all problems in flight together, greedily: for servers, which have hundreds under way.

    A text is read whole, without a cache: one forward over many texts costs less than many forwards over their ends.

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

    async def predict(self, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
        """See `Draft`."""
        if not response_ids:
            return []
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Read([*prompt_ids, *response_ids[:-1]], len(prompt_ids) - 1, done))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await done

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let every problem that has its text ask
            batch = self._next_batch()
            try:
                predicted = await asyncio.to_thread(self._read, batch)
            except Exception as error:  # a failed forward fails the texts in it
                for read in batch:
                    _settle(read.done, error)
                continue
            for read, tokens in zip(batch, predicted, strict=True):
                _settle(read.done, tokens)

    def _next_batch(self) -> list[_Read]:
        """The longest-waiting texts that fit into one forward, one at least."""
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
        rows = [read.text + [0] * (size - len(read.text)) for read in batch]  # what stands behind a text is not seen
        logits = self.model(input_ids=torch.tensor(rows, device=execution_device(self.model)), use_cache=False).logits
        best = logits[..., : self.vocab_size].argmax(-1).tolist()
        self.num_forwards += 1
        return [row[read.first : len(read.text)] for row, read in zip(best, batch, strict=True)]


def _settle(done: asyncio.Future[list[int]], result: list[int] | Exception) -> None:
    if done.done():  # the problem was cancelled
        return
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
