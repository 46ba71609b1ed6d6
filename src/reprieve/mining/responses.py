"""Responses as tokens and as text: end conditions and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.prompting import prompt_ids_of


@dataclass(frozen=True)
class ResponseFormat:
    """End conditions and text of a task's responses, for a tokenizer.

    Args:
        eos_ids: tokens that end a response.
        max_new_tokens: T_max, the largest whole response, including regenerated parts.
    """

    tokenizer: Any
    task: Task
    eos_ids: frozenset[int]
    max_new_tokens: int

    def encode_prompt(self, problem: TaskProblem) -> list[int]:
        return prompt_ids_of(problem, self.tokenizer)

    def text(self, response_ids: list[int]) -> str:
        """Return the response up to its first stop text, without special tokens."""
        text = str(self.tokenizer.decode(response_ids, skip_special_tokens=True))
        return text[: min((text.find(stop) for stop in self.task.stop if stop in text), default=len(text))]

    def answer(self, response_ids: list[int]) -> str | None:
        return self.task.extract_answer(self.text(response_ids))

    async def grade(self, compare: Callable[..., bool], *given: Any) -> bool:
        """Return the result of `compare`; it runs in a thread if the task runs programs, so other problems continue."""
        if getattr(self.task, "runs_programs", False):
            return await asyncio.to_thread(compare, *given)
        return compare(*given)

    async def correct(self, response_ids: list[int], reference: str) -> bool:
        """Return True if a response gives the right answer."""
        return await self.grade(self.task.equivalent, self.answer(response_ids), reference)

    def num_left(self, response_ids: list[int]) -> int:
        """Return the remaining token budget of a response; 0 once it has ended."""
        return 0 if self.ended(response_ids) else self.max_new_tokens - len(response_ids)

    def ended(self, response_ids: list[int]) -> bool:
        """Return True if the response has ended by an end-of-text token, a stop text or its budget."""
        if not response_ids:
            return False
        if response_ids[-1] in self.eos_ids or len(response_ids) >= self.max_new_tokens:
            return True
        return self.stops is not None and self.stops(response_ids)

    def length_of(self, response_ids: list[int], *, start: int = 0) -> int | None:
        """Return the smallest length above `start`, in tokens, at which a response ends; None if it does not end."""
        return next((n for n in range(start + 1, len(response_ids) + 1) if self.ended(response_ids[:n])), None)

    @property
    def stops(self) -> Callable[[list[int]], bool] | None:
        """Function that returns True if a stop text ends in a response's last few tokens; None without stop texts."""
        return self._ends_in_stop if self.task.stop else None

    def _ends_in_stop(self, response_ids: list[int]) -> bool:
        tail = str(self.tokenizer.decode(response_ids[-max(map(len, self.task.stop)) - 1 :]))
        return any(stop in tail for stop in self.task.stop)

    def until_stop(self, response_ids: list[int], new: list[int]) -> list[int]:
        """Truncate a response's new tokens after its first stop text: a server's last block can contain more tokens."""
        if self.stops is None:
            return new
        stops, sizes = self.stops, range(1, len(new) + 1)
        return new[: next((size for size in sizes if stops([*response_ids, *new[:size]])), len(new))]
