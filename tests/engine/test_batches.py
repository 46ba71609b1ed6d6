"""Coroutines that share a batch."""

from __future__ import annotations

import asyncio

import pytest

from reprieve.engine.batches import Stepper


class Rows:
    """A batch of one row: a request is done after five steps."""

    def __init__(self):
        self.waiting, self.row, self.fails, self.finished = [], None, False, []

    @property
    def num_waiting(self):
        return len(self.waiting)

    @property
    def idle(self):
        return not self.waiting and self.row is None

    def submit(self, request):
        self.waiting.append([*request, 5])

    def drop(self, request):
        self.waiting = [one for one in self.waiting if one[0] != request[0]]
        if self.row and self.row[0] == request[0]:
            self.row = None

    def clear(self):
        self.waiting, self.row = [], None

    def step(self):
        if self.fails:
            raise RuntimeError("out of memory")
        if self.row is None:
            self.row = self.waiting.pop(0)
        self.row[2] -= 1
        if not self.row[2]:
            name, finish, _ = self.row
            self.row = None
            self.finished.append(name)
            finish(name.upper())


def test_every_text_gets_its_own_result():
    async def both(stepper):
        return await asyncio.gather(*(stepper.result(lambda finish, name=name: (name, finish)) for name in "abc"))

    assert asyncio.run(both(Stepper(Rows()))) == ["A", "B", "C"]


def test_a_failed_step_fails_every_waiting_text_and_none_after_it():
    async def work():
        rows = Rows()
        stepper = Stepper(rows)
        rows.fails = True
        first = [stepper.result(lambda finish, name=name: (name, finish)) for name in "ab"]
        failed = await asyncio.gather(*first, return_exceptions=True)
        assert [str(error) for error in failed] == ["out of memory"] * 2 and rows.idle
        rows.fails = False
        return await asyncio.wait_for(stepper.result(lambda finish: ("c", finish)), timeout=5)

    assert asyncio.run(work()) == "C"


def test_a_cancelled_text_leaves_its_row_to_the_next():
    async def work():
        rows = Rows()
        stepper = Stepper(rows)
        first, second = (asyncio.create_task(stepper.result(lambda finish, name=name: (name, finish))) for name in "ab")
        while rows.row is None:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await asyncio.wait_for(second, timeout=5) == "B"
        return rows.finished

    assert asyncio.run(work()) == ["b"]
