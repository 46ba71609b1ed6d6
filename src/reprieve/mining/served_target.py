"""Target behind servers that exchange token ids; the problems in flight share the servers' batches."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.backends.client import Client
from reprieve.engine.continuations import Session
from reprieve.errors import SpecError
from reprieve.mining.target import ResponseFormat, Target
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import Draw, UniformDraw
from reprieve.settings import SamplingParams
from reprieve.types import Block, HiddenStates, Prefill

T = TypeVar("T")
Read = Callable[[Sequence[int], int, int], list[Mapping[int, float]]]
_MOST_WALKS = 16  # concurrent walks: enough to overlap drafting with the server's answers
_POLL_S = 0.5


class ServedTarget(Target):
    """Target that continues texts through requests; the servers' prefix caches hold a problem's common prefixes.

    Args:
        make_client: makes a client, once, in the event loop that uses it.
        params: sampling of the rollouts.
        responses: their end conditions.
        extra: additional fields of every request, which disable the server's rules.
    """

    def __init__(
        self,
        make_client: Callable[[], Client],
        params: SamplingParams,
        responses: ResponseFormat,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._make_client = make_client
        self._params = dataclasses.replace(
            params, stop=tuple(responses.task.stop), eos_token_ids=tuple(sorted(responses.eos_ids))
        )
        self._responses = responses
        self._extra = extra
        self._client: tuple[asyncio.AbstractEventLoop, Client] | None = None
        self._threads = ThreadPoolExecutor(_MOST_WALKS, "walk")
        self._computing = threading.Lock()
        self._walk = threading.local()

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
        """Return a completion. See `complete_all`."""
        return (await self.complete_all(session, prompt_ids, response_ids, max_new_tokens, [draw]))[0]

    async def complete_all(
        self,
        session: Session,
        prompt_ids: list[int],
        response_ids: list[int],
        max_new_tokens: int,
        draws: Sequence[Draw | None],
    ) -> list[list[int]]:
        """Return completions with several draws, in one request. See `Target`.

        Raises:
            SpecError: draws keyed by the prefix, which a server cannot make.
            EngineError: no server answers.
        """
        first = draws[0]
        params = dataclasses.replace(self._params, max_new_tokens=max_new_tokens)
        if first is None:
            params = dataclasses.replace(params, temperature=0.0, top_p=1.0, top_k=0)
        elif isinstance(first, UniformDraw):
            params = dataclasses.replace(params, seed=first.seed)
        else:
            raise SpecError("a server's draws cannot be keyed by the prefix: mine at temperature 0, or locally")
        text = [*prompt_ids, *response_ids]
        completions = await self._in_this_loop().complete(
            text, params, extra=self._extra, num=len(draws), keep_stop=True
        )
        return [self._responses.until_stop(response_ids, one.token_ids) for one in completions]

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """Run code in its own thread; one thread computes at a time while others wait for servers. See `Target`."""
        self._in_this_loop()
        dropped = threading.Event()

        def run() -> T:
            with self._computing:
                self._walk.dropped = dropped
                _require_wanted(dropped)
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except asyncio.CancelledError:
            dropped.set()  # a thread cannot be stopped; it ends at its next request
            raise

    def read(self, token_ids: Sequence[int], num_rows: int, num_candidates: int) -> list[Mapping[int, float]]:
        """Return the candidates after each of the last tokens of a text (see `Client.read`); only inside `apart`."""
        assert self._client is not None
        loop, client = self._client
        dropped: threading.Event = self._walk.dropped
        _require_wanted(dropped)
        question = client.read(token_ids, num_rows, num_candidates, extra=self._extra)
        try:
            asking = asyncio.run_coroutine_threadsafe(question, loop)
        except RuntimeError:  # the loop is closed
            question.close()
            raise CancelledError from None
        with self._letting_others_compute():
            # A closing loop may never run its last callbacks.
            while not wait([asking], timeout=_POLL_S).done:
                _require_wanted(dropped)
            return list(asking.result())

    @contextmanager
    def _letting_others_compute(self) -> Iterator[None]:
        """Give up the lock that `run_blocking` holds for this thread, and take it back at the end."""
        self._computing.release()
        try:
            yield
        finally:
            self._computing.acquire()

    def _in_this_loop(self) -> Client:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = loop, self._make_client()
        return self._client[1]


def _require_wanted(dropped: threading.Event) -> None:
    """Raise `CancelledError` if the walk was cancelled."""
    if dropped.is_set():
        raise CancelledError


class ServedModel(CachedModel):
    """Returns the log-probabilities of the most likely next tokens as logits, -inf for all others; enough for sampling.

    Nothing is cached, because vLLM itself rereads the whole text to return log-probabilities of its tokens.

    Args:
        read: requests the candidates after each of the last tokens of a text; takes the text, the number of tokens, and
            the number of candidates for each.
        stand_in: a model with the same tokenizer; only its positions and device matter.
        num_candidates: per position, 1 to 20.
    """

    def __init__(self, read: Read, stand_in: PreTrainedModel, *, vocab_size: int, num_candidates: int) -> None:
        super().__init__(stand_in, vocab_size=vocab_size, direct=False)
        self._read = read
        self._num_candidates = num_candidates
        self._num_columns = vocab_size

    def start(self, token_ids: Sequence[int], *, reuse_prefix: bool = False) -> Prefill:
        """Start a text as `CachedModel` does; requests nothing yet."""
        self.cached_ids = list(token_ids)
        return Prefill()

    def _run(
        self, token_ids: Sequence[int] | Tensor, *, num_logits: int | None, tree: Block | None = None
    ) -> tuple[Tensor, HiddenStates | None]:
        if tree is not None:
            raise SpecError("a target on servers can verify chains only, but the drafter drafts trees")
        new = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
        num_rows = len(new) if num_logits is None else num_logits
        logprobs = self._read([*self.cached_ids, *new], num_rows, self._num_candidates)
        logits = torch.full((num_rows, self._num_columns), -math.inf)
        for row, candidates in enumerate(logprobs):
            # Columns beyond the draft's are padding of the target's vocabulary.
            known = {token_id: value for token_id, value in candidates.items() if token_id < self._num_columns}
            logits[row, list(known)] = torch.tensor(list(known.values()))
        self.cached_ids += new
        return logits.to(self.device), None
