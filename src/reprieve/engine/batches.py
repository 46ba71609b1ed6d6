"""Texts that are generated together, and coroutines that wait for them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from reprieve.errors import require_whole

RequestT = TypeVar("RequestT")
RowT = TypeVar("RowT", bound="TextRow[Any]")
ResultT = TypeVar("ResultT")

_TURNS_TO_SUBMIT = 6  # of the event loop, between a finished text and the next request of an evaluation


@dataclass(eq=False)
class TextRow(Generic[RequestT]):
    """A text in progress, in a row of the caches."""

    request: RequestT
    token_ids: list[int]  # given and new ones; all but the last are cached


class TextBatch(ABC, Generic[RequestT, RowT]):
    """Texts that are generated together: call `submit`, then `step` until `idle`.

    Args:
        num_rows: texts in one forward, 1 or more; the others wait.

    Raises:
        SpecError: fewer than 1 row.
    """

    def __init__(self, num_rows: int) -> None:
        require_whole("num_rows", num_rows, 1)
        self._rows: list[RowT | None] = [None] * num_rows
        self._waiting: deque[RequestT] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of texts that wait for a row."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """True if no text is waiting or in progress."""
        return not self._waiting and not any(self._rows)

    @abstractmethod
    def submit(self, request: RequestT) -> None:
        """Queue a text."""

    def drop(self, request: RequestT) -> None:
        """Cancel a text."""
        self._waiting = deque(other for other in self._waiting if other is not request)
        self._rows = [None if row and row.request is request else row for row in self._rows]

    def clear(self) -> None:
        """Cancel every text, after a failed forward."""
        self._waiting.clear()
        self._rows = [None] * len(self._rows)

    @abstractmethod
    def step(self) -> None:
        """Advance every text in progress; waiting ones take free rows first."""

    @abstractmethod
    def _copy_row(self, source: int, to: int) -> None:
        """Copy what the models have cached of a text to another row."""

    def _in_progress(self, device: torch.device) -> tuple[list[int], list[RowT], list[RowT | None]]:
        """Return the numbers of the rows with a text, these rows, and all rows that a forward reads.

        Forwards over all rows run as CUDA graphs; elsewhere, texts first move together, and free rows are not read.
        """
        whole = device.type == "cuda"
        if not whole:
            self._close_gaps()
        numbers = [number for number, row in enumerate(self._rows) if row]
        read = self._rows if whole else self._rows[: len(numbers)]
        return numbers, [row for row in self._rows if row], read

    def _close_gaps(self) -> None:
        """Move texts from the last rows into free ones, so that the first rows hold all of them."""
        num = sum(map(bool, self._rows))
        free = [number for number in range(num) if not self._rows[number]]
        moving = [number for number in range(num, len(self._rows)) if self._rows[number]]
        for source, to in zip(moving, free, strict=True):
            self._copy_row(source, to)
            self._rows[source], self._rows[to] = None, self._rows[source]


class Stepper(Generic[RequestT, ResultT]):
    """Steps a batch until it is idle, for coroutines that wait for its texts.

    Args:
        turns: step once in this many turns of the event loop, so that other batches advance and more texts gather. If a
            text has finished and none waits for its row, more turns pass, so that the next request can take it.
    """

    def __init__(self, batch: TextBatch[RequestT, Any], *, turns: int = 1) -> None:
        self.batch = batch
        self.turns = turns
        self._waiting: set[asyncio.Future[ResultT]] = set()
        self._finished = False  # whether the last step finished a text
        self._stepping: asyncio.Task[None] | None = None

    async def result(self, make_request: Callable[[Callable[[ResultT], None]], RequestT]) -> ResultT:
        """Submit a request and return its result. A failed forward fails every waiting text.

        Args:
            make_request: makes the request, given the function to call with the result.
        """
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()

        def finish(result: ResultT) -> None:
            self._finished = True
            if not done.done():  # done if it was cancelled
                done.set_result(result)

        request = make_request(finish)
        self.batch.submit(request)
        self._waiting.add(done)
        done.add_done_callback(self._waiting.discard)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
            self._stepping.add_done_callback(_retrieve)
        try:
            return await done
        except asyncio.CancelledError:
            self.batch.drop(request)
            raise

    async def _step(self) -> None:
        while not self.batch.idle:
            free = self._finished and not self.batch.num_waiting
            for _ in range(max(self.turns, _TURNS_TO_SUBMIT) if free else self.turns):
                await asyncio.sleep(0)  # texts that start now join the step, and other batches have their turn
            self._finished = False
            try:
                self.batch.step()
            except Exception as error:
                self.batch.clear()  # so that the failure does not affect later texts
                for done in [one for one in self._waiting if not one.done()]:
                    done.set_exception(error)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark a task's exception as handled: Ctrl-C in a forward is raised by the event loop too."""
    if not task.cancelled():
        task.exception()
