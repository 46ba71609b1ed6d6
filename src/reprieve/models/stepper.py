"""Coroutines that wait for texts of one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Request = TypeVar("Request")
Submitted = TypeVar("Submitted", contravariant=True)
Result = TypeVar("Result")


class Batch(Protocol[Submitted]):
    """Generates several texts at once: `BatchDecoder` and `BatchedSpeculativeDecoder`."""

    @property
    def idle(self) -> bool:
        """True if no text is waiting or in progress."""
        ...

    def submit(self, request: Submitted) -> None:
        """Queue a text."""
        ...

    def drop(self, request: Submitted) -> None:
        """Cancel a text."""
        ...

    def clear(self) -> None:
        """Cancel every text, after a failed forward."""
        ...

    def step(self) -> None:
        """Advance every text in progress."""
        ...


class Stepper(Generic[Request, Result]):
    """Steps a batch for as long as coroutines wait for its texts."""

    def __init__(self, batch: Batch[Request]) -> None:
        self.batch = batch
        self._waiting: set[asyncio.Future[Result]] = set()
        self._stepping: asyncio.Task[None] | None = None

    async def result(self, make_request: Callable[[Callable[[Result], None]], Request]) -> Result:
        """Submit a request and return its result. A failed forward fails every waiting text.

        Args:
            make_request: makes the request, given the function to call with the result.
        """
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def finish(result: Result) -> None:
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

    def close(self) -> None:
        """Stop stepping."""
        if self._stepping is not None:
            self._stepping.cancel()

    async def _step(self) -> None:
        while not self.batch.idle:
            await asyncio.sleep(0)  # texts that start now join the step, and other batches have their turn
            try:
                self.batch.step()
            except Exception as error:
                self.batch.clear()  # so that the failure does not affect later texts
                for done in [one for one in self._waiting if not one.done()]:
                    done.set_exception(error)
