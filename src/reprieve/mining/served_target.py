"""Target behind servers that exchange token ids; the problems in flight share the servers' batches."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from reprieve.backends.client import Client
from reprieve.errors import SpecError
from reprieve.mining.responses import until_stop
from reprieve.mining.target import Target
from reprieve.models.batch_decoder import Session
from reprieve.models.sampling import Draw, UniformDraw
from reprieve.settings import SamplingParams

T = TypeVar("T")
_MOST_WALKS = 16  # concurrent walks: enough to overlap drafting with the server's answers
_POLL_S = 0.5


class ServedTarget(Target):
    """Target that continues texts through requests; the servers' prefix caches hold a problem's common prefixes.

    Args:
        make_client: makes a client, once, in the event loop that uses it.
        params: sampling of the rollouts.
        eos_ids: tokens that end a response.
        stop: stop texts.
        stops: returns True if one of them ends a response's tokens.
        extra: additional fields of every request, which disable the server's rules.
    """

    def __init__(
        self,
        make_client: Callable[[], Client],
        params: SamplingParams,
        *,
        eos_ids: Sequence[int],
        stop: Sequence[str],
        stops: Callable[[list[int]], bool] | None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._make_client = make_client
        self._params = params
        self._eos_ids = tuple(eos_ids)
        self._stop = tuple(stop)
        self._stops = stops
        self._extra = extra
        self._client: tuple[asyncio.AbstractEventLoop, Client] | None = None
        self._threads = ThreadPoolExecutor(_MOST_WALKS, "walk")
        self._computing = threading.Lock()
        self._walk = threading.local()

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
        """Return a completion. See `Target`.

        Raises:
            SpecError: draws keyed by the prefix, which a server cannot make.
            EngineError: no server answers.
        """
        return (await self.complete_all(session, prompt_ids, response_ids, max_new_tokens, [draw]))[0]

    async def complete_all(
        self,
        session: Session,
        prompt_ids: list[int],
        response_ids: list[int],
        max_new_tokens: int,
        draws: Sequence[Draw | None],
    ) -> list[list[int]]:
        """Return completions with several draws, in one request. See `Target`."""
        first = draws[0]
        params = dataclasses.replace(
            self._params, max_new_tokens=max_new_tokens, stop=self._stop, eos_token_ids=self._eos_ids
        )
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
        return [until_stop(self._stops, response_ids, one.token_ids) for one in completions]

    async def apart(self, work: Callable[[], T]) -> T:
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
        self._computing.release()
        try:
            # A closing loop may never run its last callbacks.
            while not wait([asking], timeout=_POLL_S).done:
                _require_wanted(dropped)
            return list(asking.result())
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
