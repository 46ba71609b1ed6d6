"""Target interface of miners: continues many texts at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from reprieve.models.batch_decoder import BatchDecoder, Session, Stepper, TextRequest
from reprieve.models.sampling import Draw

T = TypeVar("T")


class Target(Protocol):
    """Continues texts. One `Session` per problem caches the common prefixes of its texts."""

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int] | None:
        """Return at most `max_new_tokens` tokens after prompt and response, the end-of-text token included.

        Args:
            draw: random draws of the tokens; None for greedy decoding.

        Returns:
            The new tokens, or None if the target would tokenize the text differently (a text API).
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
        """Return a completion for each draw, or None if one of them is None."""
        completions = await gather_all(
            self.complete(session, prompt_ids, response_ids, max_new_tokens, draw) for draw in draws
        )
        whole = [new for new in completions if new is not None]
        return whole if len(whole) == len(completions) else None

    async def apart(self, work: Callable[[], T]) -> T:
        """Run synchronous code that reads the target and return its result; subclasses may use a thread."""
        return work()


class LocalTarget(Target):
    """Local target; the requests of all problems in flight share forwards."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self._stepper: Stepper[TextRequest, list[int]] = Stepper(decoder)

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
        """Return a completion. See `Target`.

        Raises:
            ContextOverflowError: the text could exceed the model's positions.
        """
        text = [*prompt_ids, *response_ids]
        return await self._stepper.result(
            lambda finish: TextRequest(session, text, max_new_tokens, draw, finish, response_start=len(prompt_ids))
        )


async def gather_all(texts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(text) for text in texts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
