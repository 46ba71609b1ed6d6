"""Many coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
S = TypeVar("S")


async def results_of(
    items: Iterable[S], make: Callable[[S], Coroutine[Any, Any, T]], *, num_parallel: int
) -> AsyncIterator[list[T]]:
    """Yield lists of results of `make` as calls complete, with at most `num_parallel` calls in flight.

    After the first failure no new call starts; the failure is raised once the calls in flight have ended and their
    results were yielded.
    """
    waiting = iter(items)
    running = {asyncio.create_task(make(item)) for item in islice(waiting, num_parallel)}
    failures: list[BaseException] = []
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            failures += [error for task in done if (error := task.exception())]
            if not failures:
                running |= {asyncio.create_task(make(item)) for item in islice(waiting, len(done))}
            if results := [task.result() for task in done if task.exception() is None]:
                yield results
        if failures:
            raise failures[0]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def iterate(
    loop: asyncio.Runner, results: AsyncIterator[list[T]], *, closing: Callable[[], Awaitable[None]] | None = None
) -> Iterator[T]:
    """Yield the results of `results_of` one by one, synchronously; coroutines run only while the caller waits.

    An interrupt loses the results of a list that the caller has not taken yet.

    Args:
        closing: awaited at the end, even after an error.
    """
    end = object()

    async def following() -> list[T] | object:
        return await anext(results, end)

    async def close() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}  # a signal may have come between
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await results.aclose()  # type: ignore[attr-defined]
        if closing is not None:
            await closing()

    try:
        while (finished := loop.run(following())) is not end:
            yield from finished  # type: ignore[misc]
    finally:
        loop.run(close())


async def gather_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
