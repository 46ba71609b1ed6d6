"""Thread that runs the engine: a bounded queue of requests, answered one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException

from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import ReprieveError
from reprieve.policies.menu import Choice
from reprieve.types import Generation, Token

logger = logging.getLogger("reprieve.server")
_STOPPED = "the server is shutting down"


@dataclass(frozen=True)
class Piece:
    """One token of one choice, and the text that it completed (often a word, sometimes nothing)."""

    index: int
    token: Token
    text: str


@dataclass(frozen=True)
class Finished:
    """One choice is complete."""

    index: int
    generation: Generation


Event = Piece | Finished | Exception  # an exception ends the request without an answer


class _Cancelled(Exception):
    """Raised inside the engine to end an answer nobody waits for."""


@dataclass(eq=False)
class QueuedRequest:
    """A request, and the event loop that its events are sent to.

    Args:
        prompts: token ids, one list for each choice.
        params: sampling, one for each choice.
        choice: rule and setting.
    """

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    choice: Choice
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    work: Future[None] = field(init=False)  # set when the request is queued
    cancelled: bool = False

    @property
    def waiting(self) -> bool:
        """True while the request is in the queue."""
        return not (self.work.running() or self.work.done())

    def cancel(self) -> None:
        """Leave the queue, or stop before the next token: the client is no longer waiting."""
        self.cancelled = True
        self.work.cancel()

    def send(self, event: Event) -> None:
        """Pass an event to the event loop of the request, from any thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed: no client is waiting
            self.cancel()


class Worker:
    """Answers requests, one at a time.

    Args:
        decoders: by rule of the menu; None for lossless.
        max_waiting: requests that may wait; more are refused with status 429.
    """

    def __init__(self, decoders: Mapping[str | None, SpeculativeDecoder], *, max_waiting: int) -> None:
        self._decoders = decoders
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(1, "reprieve-engine")
        self._jobs: list[QueuedRequest] = []  # replaced, never changed, as other threads read it
        self._stopped = False

    @property
    def num_waiting(self) -> int:
        """Requests in the queue whose clients are still there."""
        return sum(job.waiting for job in self._jobs)

    @property
    def busy(self) -> bool:
        """True while a request is answered."""
        return any(job.work.running() for job in self._jobs)

    def submit(self, job: QueuedRequest) -> None:
        """Queue a request, or refuse it immediately; for the event loop's thread only.

        Raises:
            HTTPException: 429 if too many wait, 503 after `stop`.
        """
        if self._stopped:
            raise HTTPException(503, _STOPPED)
        if self.num_waiting >= self._max_waiting:
            raise HTTPException(429, f"{self._max_waiting} requests are waiting already; try again later")
        job.work = self._thread.submit(self._work, job)
        self._jobs = [*(other for other in self._jobs if not other.work.done()), job]
        if self._stopped:  # by a signal, after the check above
            self.stop()

    def stop(self) -> None:
        """End all requests with an error, and refuse further ones; may be called by a signal handler."""
        self._stopped = True
        for job in self._jobs:
            if not job.work.done():
                job.cancel()
                job.send(HTTPException(503, _STOPPED))

    def close(self) -> None:
        """Wait for the end of the current request."""
        self._thread.shutdown(cancel_futures=True)

    def _work(self, job: QueuedRequest) -> None:
        try:
            self._answer(job)
        except _Cancelled:
            pass  # whoever cancelled it has told the client, or there is none
        except ReprieveError as error:
            job.send(error)
        except Exception:
            logger.exception("a request failed")
            job.send(ReprieveError("the engine failed"))

    def _answer(self, job: QueuedRequest) -> None:
        decoder = self._decoders[None if job.choice.strict else job.choice.name]
        for index, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):

            def take(token: Token, text: str, index: int = index) -> None:
                if job.cancelled:
                    raise _Cancelled
                job.send(Piece(index, token, text))

            generation = decoder.generate(prompt, params, dial=job.choice.rule.dial_value, on_token=take)
            job.send(Finished(index, generation))
