"""Many calls at once: a batch stays full, and results that came before a failure are kept."""

import asyncio
from dataclasses import dataclass

import pytest

from reprieve.concurrency import iterate, results_of
from reprieve.engine.batches import Stepper, TextBatch


@dataclass(eq=False)
class _Text:
    num_left: int
    on_done: object


class _Countdown(TextBatch):
    """Each step brings every text one step closer to its end."""

    def __init__(self, num_rows):
        super().__init__(num_rows)
        self.sizes = []

    def submit(self, request):
        self._waiting.append(request)

    def step(self):
        for row, text in enumerate(self._rows):
            if text is None and self._waiting:
                self._rows[row] = self._waiting.popleft()
        self.sizes.append(sum(map(bool, self._rows)))
        for row, text in enumerate(self._rows):
            if text is not None:
                text.num_left -= 1
                if not text.num_left:
                    self._rows[row] = None
                    text.on_done(text)

    def _copy_row(self, source, to):
        return


def test_finished_texts_are_replaced_before_the_next_step():
    """A reader that lets the batch step for each result that it takes would empty it in waves."""
    batch, lengths = _Countdown(64), [5 + 7 * number % 23 for number in range(900)]
    stepper = Stepper(batch)

    async def call(length):
        await stepper.result(lambda finish: _Text(length, finish))
        return length

    with asyncio.Runner() as loop:
        read = list(iterate(loop, results_of(lengths, call, num_parallel=64)))
    assert sorted(read) == sorted(lengths)
    assert min(batch.sizes[: -max(lengths)]) == 64


def test_results_that_came_before_a_failure_are_yielded():
    async def call(item):
        await asyncio.sleep(0)
        if item == 5:
            raise ValueError("no")
        return item

    read = []
    with asyncio.Runner() as loop:
        results = iterate(loop, results_of(range(20), call, num_parallel=4))
        with pytest.raises(ValueError, match="no"):
            read.extend(results)
    assert {0, 1, 2, 3, 4} <= set(read) < set(range(20))
