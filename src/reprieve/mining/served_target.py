"""Target behind servers that exchange token ids; the problems in flight share the servers' batches."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from reprieve.backends.client import Client
from reprieve.engine import Pair
from reprieve.engine.continuations import Session
from reprieve.errors import SpecError
from reprieve.mining.target import ResponseFormat, Target
from reprieve.models.sampling import Draw, UniformDraw
from reprieve.settings import SamplingParams

T = TypeVar("T")


class ServedTarget(Target):
    """Target that continues texts through requests; the servers' prefix caches hold a problem's common prefixes.

    Args:
        make_client: makes a client, once, in the event loop that uses it.
        params: sampling of the rollouts.
        responses: their end conditions.
        pair: the draft, which has the target's tokenizer.
        num_candidates: tokens per position that `read` requests, 1 to 20.
        extra: additional fields of every request, which disable the server's rules.
    """

    def __init__(
        self,
        make_client: Callable[[], Client],
        params: SamplingParams,
        responses: ResponseFormat,
        pair: Pair,
        *,
        num_candidates: int,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._make_client = make_client
        self._params = dataclasses.replace(
            params, stop=tuple(responses.task.stop), eos_token_ids=tuple(sorted(responses.eos_ids))
        )
        self._responses = responses
        self._pair = pair
        self._num_candidates = num_candidates
        self._extra = extra
        self._client: tuple[asyncio.AbstractEventLoop, Client] | None = None
        self._thread = ThreadPoolExecutor(1, "draft")

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
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
        """Run code in one thread, so that servers are heard meanwhile. See `Target`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def read(self, text: list[int], tokens: list[int]) -> Tensor:
        """Return the log-probabilities after a text and after each token that follows, [n + 1, V], as logits.

        They are -inf except for the most likely tokens, which are enough for sampling. Nothing is cached, because vLLM
        itself rereads the whole text to return log-probabilities of its tokens.
        """
        size = self._pair.vocab_size
        found = await self._in_this_loop().read(
            [*text, *tokens], len(tokens) + 1, self._num_candidates, extra=self._extra
        )
        logits = torch.full((len(found), size), -math.inf)
        for row, candidates in enumerate(found):
            # Columns beyond the draft's are padding of the target's vocabulary.
            known = {token_id: value for token_id, value in candidates.items() if token_id < size}
            logits[row, list(known)] = torch.tensor(list(known.values()))
        return logits.to(self._pair.device)

    def _in_this_loop(self) -> Client:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = loop, self._make_client()
        return self._client[1]
