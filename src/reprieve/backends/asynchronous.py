"""Many coroutines at once, their results one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
S = TypeVar("S")


async def results_of(items: Iterable[S], make: Callable[[S], Awaitable[T]], *, num_parallel: int) -> AsyncIterator[T]:
    """Yield the results of `make` as they complete, with at most `num_parallel` calls in flight.

    After the first failure no new call starts; the failure is raised once the calls in flight have ended and their
    results were yielded.
    """
    finished: asyncio.Queue[T] = asyncio.Queue()
    waiting = iter(items)
    failures: list[Exception] = []

    async def work() -> None:
        for item in waiting:
            try:
                finished.put_nowait(await make(item))
            except Exception as error:
                failures.append(error)
            if failures:
                return

    workers = [asyncio.create_task(work()) for _ in range(num_parallel)]
    everyone = asyncio.gather(*workers)
    try:
        while not (everyone.done() and finished.empty()):
            if finished.empty():
                coming = asyncio.create_task(finished.get())
                awaited: set[asyncio.Future[Any]] = {coming, everyone}
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    continue
                yield coming.result()
            else:
                yield finished.get_nowait()
        if failures:
            raise failures[0]
    finally:
        everyone.cancel()
        await asyncio.gather(*workers, everyone, return_exceptions=True)


def iterate(
    loop: asyncio.Runner, results: AsyncIterator[T], *, closing: Callable[[], Awaitable[None]] | None = None
) -> Iterator[T]:
    """Turn an asynchronous iterator into a synchronous one; coroutines run only while the caller waits for a result.

    Args:
        closing: awaited at the end, even after an error.
    """

    async def following() -> tuple[bool, T | None]:
        try:
            return True, await anext(results)
        except StopAsyncIteration:
            return False, None

    async def close() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}  # a signal may have come between
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await results.aclose()  # type: ignore[attr-defined]
        if closing is not None:
            await closing()

    try:
        while True:
            there, result = loop.run(following())
            if not there:
                return
            yield result  # type: ignore[misc]
    finally:
        loop.run(close())
