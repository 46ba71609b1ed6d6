"""Coroutines that wait for texts of one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

RequestT = TypeVar("RequestT")
SubmittedT = TypeVar("SubmittedT", contravariant=True)
ResultT = TypeVar("ResultT")


class TextBatch(Protocol[SubmittedT]):
    """Generates several texts at once: `BatchDecoder` and `BatchedSpeculativeDecoder`."""

    @property
    def idle(self) -> bool:
        """True if no text is waiting or in progress."""
        ...

    def submit(self, request: SubmittedT) -> None:
        """Queue a text."""
        ...

    def drop(self, request: SubmittedT) -> None:
        """Cancel a text."""
        ...

    def clear(self) -> None:
        """Cancel every text, after a failed forward."""
        ...

    def step(self) -> None:
        """Advance every text in progress."""
        ...


class Stepper(Generic[RequestT, ResultT]):
    """Steps a batch until it is idle, for coroutines that wait for its texts."""

    def __init__(self, batch: TextBatch[RequestT]) -> None:
        self.batch = batch
        self._waiting: set[asyncio.Future[ResultT]] = set()
        self._stepping: asyncio.Task[None] | None = None

    async def result(self, make_request: Callable[[Callable[[ResultT], None]], RequestT]) -> ResultT:
        """Submit a request and return its result. A failed forward fails every waiting text.

        Args:
            make_request: makes the request, given the function to call with the result.
        """
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()

        def finish(result: ResultT) -> None:
            if not done.done():  # done if it was cancelled
                done.set_result(result)

        request = make_request(finish)
        self.batch.submit(request)
        self._waiting.add(done)
        done.add_done_callback(self._waiting.discard)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            return await done
        except asyncio.CancelledError:
            self.batch.drop(request)
            raise

    async def _step(self) -> None:
        while not self.batch.idle:
            await asyncio.sleep(0)  # texts that start now join the step, and other batches have their turn
            try:
                self.batch.step()
            except Exception as error:
                self.batch.clear()  # so that the failure does not affect later texts
                for done in [one for one in self._waiting if not one.done()]:
                    done.set_exception(error)
