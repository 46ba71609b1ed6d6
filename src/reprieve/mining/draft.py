"""Draft and target as miners read them: the draft's token at every position, drafted blocks, the target's logits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.errors import SpecError
from reprieve.models.attention import without_cudnn
from reprieve.models.cache import RollbackCache
from reprieve.models.cached_model import CachedModel, execution_device, require_positions, shared_length
from reprieve.models.eagle3 import EagleHead
from reprieve.models.sampling import GumbelNoise, Sampler, gumbel_choice
from reprieve.transfers import device_tensor
from reprieve.types import Block, HiddenStates

ReadBlock = Callable[[list[int], list[int]], Awaitable[Tensor]]  # a text, and n tokens after it: to logits [n + 1, V]
_AHEAD = 32  # tokens read at once
_MOST_LOGITS = 2**28  # logits per forward: a GiB in float32


class Draft(Protocol):
    """Finds the tokens of a response that the draft would not have chosen."""

    def mismatches(
        self, prompt_ids: list[int], response_ids: list[int], start: int = 0
    ) -> AsyncIterator[tuple[int, int]]:
        """Yield each position from `start` on where the draft's own token differs, and that token."""
        ...


class EagleModel(CachedModel):
    """EAGLE-3 head and its target as one model, which predicts the first drafted token.

    Logits are the head's; all -inf after a text's first token.

    Args:
        head: on the target's device.
        vocab_size: columns of the logits.
    """

    def __init__(self, target: PreTrainedModel, head: EagleHead, *, vocab_size: int) -> None:
        super().__init__(target, hidden_layers=head.layers_read)
        self.head = head
        self._num_columns = vocab_size
        self._head_cache = RollbackCache()
        self._states = torch.empty(0, head.fc.out_features, dtype=head.fc.weight.dtype, device=self.device)

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens."""
        super().truncate(length)
        self._head_cache.truncate(max(0, length - 1))
        self._states = self._states[:length]

    def _run(
        self, token_ids: Sequence[int] | Tensor, *, num_logits: int | None, tree: Block | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        first = max(1, self.length)  # the head reads a token with the state of the one before
        _, hidden = super()._run(token_ids, num_logits=1)
        assert hidden is not None and tree is None
        self._states = torch.cat([self._states, self.head.fuse(hidden)])
        num_rows = len(token_ids) if num_logits is None else num_logits
        logits = torch.full((num_rows, self._num_columns), -torch.inf, device=self.device)
        if unread := self.cached_ids[first:]:
            tokens = device_tensor(unread, torch.long, self.device)
            read, _ = self.head.read(tokens, self._states[first - 1 : -1], cache=self._head_cache, num_cached=first - 1)
            known = read[-num_rows:]
            logits[num_rows - len(known) :, self.head.target_ids] = known
        return logits, None


class DraftReader(Draft):
    """Reads one problem's responses a few tokens ahead; common prefixes are read once.

    A swap changes the rest of the response, so tokens far beyond the next mismatch are not read in advance.

    Args:
        model: the draft, or an `EagleModel`.
        sampler: temperature, top-k and top-p.
        noise: makes sampling repeatable; None when greedy.
    """

    def __init__(self, model: CachedModel, sampler: Sampler, noise: GumbelNoise | None = None) -> None:
        self.model = model
        self.sampler = sampler
        self.noise = noise
        self._predicted: list[int] = []  # next token after each cached one, from the prompt's last

    async def mismatches(
        self, prompt_ids: list[int], response_ids: list[int], start: int = 0
    ) -> AsyncIterator[tuple[int, int]]:
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
            self.model.start(prompt_ids[:-1], reuse_prefix=True)
            shared, self._predicted = first, []
        self.model.truncate(shared)
        del self._predicted[shared - first :]
        if shared < len(text) - 1:
            logits, _ = self.model.forward(text[shared:-1])
            self._predicted += self._choose(logits, text, shared)
        return self._predicted[: len(response_ids)]

    def _choose(self, logits: Tensor, text: list[int], shared: int) -> list[int]:
        scores = self.sampler.target_scores(logits)
        if self.noise is None:
            return scores.argmax(-1).tolist()
        return gumbel_choice(scores, self.noise.keys(text[:-1], shared + 1)).tolist()


@dataclass(eq=False)
class _Text:
    token_ids: list[int]
    first: int  # first position whose next token is needed
    predicted: list[int] | None = None


class BatchedDraft(Draft):
    """Draft that batches the responses of all problems in flight; greedy only. For accelerators, with a served target.

    Whole texts are read without a cache: on an accelerator, one forward over many texts costs less than many
    forwards over their suffixes. One thread runs the forwards, so that servers are heard meanwhile.

    Args:
        model: the draft.
        vocab_size: tokens of the target; the draft may have more columns.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._waiting: list[_Text] = []
        self._thread = ThreadPoolExecutor(1, "draft")

    async def mismatches(
        self, prompt_ids: list[int], response_ids: list[int], start: int = 0
    ) -> AsyncIterator[tuple[int, int]]:
        for position, token in _differing(response_ids, await self.predict(prompt_ids, response_ids), start):
            yield position, token

    async def predict(self, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
        """Return the draft's own token at every position of the response, given the response before it."""
        if not response_ids:
            return []
        text = _Text([*prompt_ids, *response_ids[:-1]], len(prompt_ids) - 1)
        self._waiting.append(text)
        await asyncio.sleep(0)  # let all ready problems enqueue their texts
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_up_to, text)

    def _read_up_to(self, text: _Text) -> list[int]:
        """Read waiting texts, the oldest first, until this one is read, and return its tokens."""
        while text.predicted is None:
            batch = self._next_batch()
            try:
                predicted = self._read(batch)
            except Exception:
                self._waiting.remove(text)
                raise
            for one, tokens in zip(batch, predicted, strict=True):
                one.predicted = tokens
            del self._waiting[: len(batch)]
        return text.predicted

    def _next_batch(self) -> list[_Text]:
        """Return the oldest texts that fit into one forward, at least one."""
        batch: list[_Text] = []
        longest = 0
        for text in list(self._waiting):
            longest = max(longest, len(text.token_ids))
            if batch and longest * (len(batch) + 1) * self.vocab_size > _MOST_LOGITS:
                break
            batch.append(text)
        return batch

    @torch.inference_mode()
    def _read(self, batch: list[_Text]) -> list[list[int]]:
        size = max(len(text.token_ids) for text in batch)
        rows = [text.token_ids + [0] * (size - len(text.token_ids)) for text in batch]  # attention hides the padding
        device = execution_device(self.model)
        with without_cudnn(device):
            logits = self.model(input_ids=torch.tensor(rows, device=device), use_cache=False).logits
        best = logits[..., : self.vocab_size].argmax(-1).tolist()
        return [row[text.first : len(text.token_ids)] for row, text in zip(best, batch, strict=True)]


class BlockReader:
    """Drafts tokens after a text of one problem, and reads the target's logits after the text and each of them.

    Args:
        draft: model with its own cache.
        read: reads the target.
        run_blocking: runs drafting and sampling (`Target.run_blocking`).
        sampler: of the problem.
        models: those that must be able to read a prompt and its response.
    """

    def __init__(
        self,
        draft: CachedModel,
        read: ReadBlock,
        run_blocking: Callable[..., Awaitable[Any]],
        sampler: Sampler,
        *,
        models: Sequence[PreTrainedModel] = (),
    ) -> None:
        self.read = read
        self.run_blocking = run_blocking
        self.sampler = sampler
        self._draft, self._models = draft, models

    def require_room(self, prompt_ids: list[int], num_new: int) -> None:
        """Refuse a prompt without tokens, or one that leaves no room for its response.

        Raises:
            SpecError: no tokens.
            ContextOverflowError: prompt and response are longer than a model can read.
        """
        if not prompt_ids:
            raise SpecError("prompt must hold at least one token, got none")
        for model in self._models:
            what = f"{len(prompt_ids)} prompt + {num_new} new tokens"
            require_positions(model, len(prompt_ids) + num_new, what=what)

    async def draft(self, text: list[int], size: int) -> tuple[list[int], list[Tensor]]:
        """Return drafted tokens and the logits [V] that each was drawn from."""
        drafted: tuple[list[int], list[Tensor]] = await self.run_blocking(lambda: self._drafted(text, size))
        return drafted

    @torch.inference_mode()
    def _drafted(self, text: list[int], size: int) -> tuple[list[int], list[Tensor]]:
        drafted: list[int] = []
        rows: list[Tensor] = []
        self._draft.start(text[:-1], reuse_prefix=True)
        for _ in range(size):
            logits, _ = self._draft.forward([drafted[-1] if drafted else text[-1]])
            rows.append(logits[-1].to(self.sampler.generator.device))
            drafted.append(int(self.sampler.draft_token(rows[-1][None])))
        return drafted, rows


def local_reader(target: CachedModel) -> ReadBlock:
    """Return a reader of a target on this machine, with its own cache."""

    async def read(text: list[int], tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            target.start(text[:-1], reuse_prefix=True)
            return target.forward([text[-1], *tokens])[0]

    return read


def _differing(response: list[int], predicted: list[int], start: int) -> list[tuple[int, int]]:
    return [(at, predicted[at]) for at in range(start, len(response)) if response[at] != predicted[at]]
