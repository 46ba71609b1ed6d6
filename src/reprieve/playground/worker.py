"""Thread that runs the engine: a bounded queue of requests, answered one at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import ReprieveError
from reprieve.types import Generation, Token
from reprieve.vllm_plugin.menu import Choice

logger = logging.getLogger("reprieve.server")


class QueueFullError(ReprieveError):
    """The queue is full."""


class StoppedError(ReprieveError):
    """The server is shutting down."""


class WorkerError(ReprieveError):
    """An unexpected error; the log has its traceback."""


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


@dataclass(frozen=True)
class Failed:
    """The job ended without an answer."""

    error: Exception


Event = Piece | Finished | Failed


class _Cancelled(Exception):
    """Raised inside the engine to end an answer nobody waits for."""


@dataclass
class QueuedRequest:
    """A request, and the callback that sends its events to the event loop that queued it.

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
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Stop before the next token: the client is no longer waiting."""
        self.cancelled.set()

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.cancel()
        self.send(Failed(error))

    def send(self, event: Event) -> None:
        """Pass an event to the event loop of the request; called from the worker's thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed: no client is waiting
            self.cancel()


class Worker:
    """Answers jobs, one at a time.

    Args:
        make_decoder: gives a decoder for a rule of the menu, by name; None for lossless.
        max_waiting: jobs that may wait; more raise `QueueFullError`.
        on_answer: called with each finished choice, in the thread.
    """

    def __init__(
        self,
        make_decoder: Callable[[str | None], SpeculativeDecoder],
        *,
        max_waiting: int,
        on_answer: Callable[[QueuedRequest, Finished], None] = lambda job, finished: None,
    ) -> None:
        self._make_decoder = make_decoder
        self._decoders: dict[str | None, SpeculativeDecoder] = {}
        self._waiting: deque[QueuedRequest] = deque()
        self._changed = threading.Condition()
        self._max_waiting = max_waiting
        self._on_answer = on_answer
        self._stopped = False
        self.running: QueuedRequest | None = None
        self._thread = threading.Thread(target=self._work, name="reprieve-engine", daemon=True)

    def start(self, names: Sequence[str | None]) -> None:
        """Create the decoders, so that unsupported rules fail before the first request, and start the thread.

        Raises:
            ReprieveError: a rule that the pair cannot serve.
        """
        for name in names:
            self._decoder(name)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue whose clients are still there."""
        with self._changed:
            return self._count()

    def _count(self) -> int:
        return sum(not job.cancelled.is_set() for job in self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: QueuedRequest) -> None:
        """Queue a job, or refuse it immediately.

        Raises:
            QueueFullError: too many wait.
            StoppedError: shutting down.
        """
        with self._changed:
            if self._stopped:
                raise StoppedError("the server is shutting down")
            if self._count() >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests are waiting already; try again later")
            self._waiting.append(job)
            self._changed.notify()

    def close(self, grace_s: float) -> None:
        """Accept no more jobs; current ones have `grace_s` seconds, then fail with an error. Returns immediately."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._changed.notify()
        timer = threading.Timer(grace_s, self._end_all)
        timer.daemon = True
        timer.start()

    def join(self) -> None:
        """Wait until everything has ended, after `close`."""
        if self._thread.is_alive():
            self._thread.join()

    def _end_all(self) -> None:
        with self._changed:
            left = [self.running, *self._waiting]
        for job in left:
            if job is not None and not job.cancelled.is_set():
                job.fail(StoppedError("the server is shutting down, and the request did not finish in time"))

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._answer(job)
            except _Cancelled:
                pass  # whoever cancelled it has told the client, or there is none
            except ReprieveError as error:
                job.send(Failed(error))
            except Exception:
                logger.exception("a request failed")
                job.send(Failed(WorkerError("the engine failed; the server's log says more")))

    def _next(self) -> QueuedRequest | None:
        """Return the next job that is not cancelled; None once the worker is closed and the queue is empty."""
        with self._changed:
            self.running = None
            while True:
                while self._waiting:
                    job = self._waiting.popleft()
                    if not job.cancelled.is_set():
                        self.running = job
                        return job
                if self._stopped:
                    return None
                self._changed.wait()

    def _answer(self, job: QueuedRequest) -> None:
        decoder = self._decoder(None if job.choice.strict else job.choice.name)
        for index, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):

            def take(token: Token, text: str, index: int = index) -> None:
                if job.cancelled.is_set():
                    raise _Cancelled
                job.send(Piece(index, token, text))

            generation = decoder.generate(prompt, params, dial=job.choice.dial, on_token=take)
            finished = Finished(index, generation)
            self._on_answer(job, finished)
            job.send(finished)

    def _decoder(self, name: str | None) -> SpeculativeDecoder:
        if name not in self._decoders:
            self._decoders[name] = self._make_decoder(name)
        return self._decoders[name]


def describe_worker(worker: Worker) -> dict[str, Any]:
    """Return the state of the worker, for /health."""
    return {
        "status": "ok" if worker.alive else "dead",
        "waiting": worker.num_waiting,
        "busy": worker.running is not None,
    }
