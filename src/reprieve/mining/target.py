"""The target as miners see it: something that continues texts, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from reprieve.models.batch_decoder import BatchDecoder, Session, TextRequest
from reprieve.models.draws import Draw

T = TypeVar("T")


class Target(Protocol):
    """Continues texts. One `Session` a problem lets it keep what the problem's texts have in common."""

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int] | None:
        """What follows prompt and response, at most `max_new_tokens` tokens, the end-of-text token included.

        Args:
            draw: how tokens are chosen; None for the most likely.

        Returns:
            None where the target would read other tokens than these (a text API that tokenizes anew).
        """
        ...

    async def complete_all(
        self,
        session: Session,
        prompt_ids: list[int],
        response_ids: list[int],
        max_new_tokens: int,
        draws: Sequence[Draw | None],
    ) -> list[list[int]] | None:
        """The same with several draws."""
        made = await gather_all(
            self.complete(session, prompt_ids, response_ids, max_new_tokens, draw) for draw in draws
        )
        whole = [new for new in made if new is not None]
        return whole if len(whole) == len(made) else None

    async def apart(self, work: Callable[[], T]) -> T:
        """What ordinary code comes to that reads the target in between; where that takes long, other problems go on."""
        return work()


class LocalTarget(Target):
    """A target on this machine: the requests of all problems in flight share forwards."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self.decoder = decoder
        self._stepping: asyncio.Task[None] | None = None

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
        """See `Target`.

        Raises:
            ContextOverflowError: the text could exceed the model's positions.
        """
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        text = [*prompt_ids, *response_ids]
        request = TextRequest(session, text, max_new_tokens, draw, _resolver(done), response_start=len(prompt_ids))
        self.decoder.submit(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        stepping = self._stepping
        waited: set[asyncio.Future[Any]] = {done, stepping}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.decoder.drop(request)
            raise
        if not done.done():
            stepping.result()  # a failed forward fails every text that waits for it
        return await done

    async def _step(self) -> None:
        try:
            while not self.decoder.idle:
                self.decoder.step()
                await asyncio.sleep(0)  # let every problem that got its text ask for the next
        except BaseException:
            self.decoder.clear()  # so that what made it fail does not fail the texts asked for after
            raise


async def gather_all(texts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels what is still under way."""
    tasks = [asyncio.ensure_future(text) for text in texts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _resolver(done: asyncio.Future[list[int]]) -> Callable[[list[int]], None]:
    def resolve(token_ids: list[int]) -> None:
        if not done.done():  # it is, when the problem was cancelled
            done.set_result(token_ids)

    return resolve
