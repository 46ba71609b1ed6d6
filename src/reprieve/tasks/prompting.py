"""Prompts of problems, raw or in the tokenizer's chat template; the same for every verb.

`with_prompts` wraps a task so that its problems carry the tokens that the model reads, and thinking is removed before
answers are extracted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reprieve.engine.text import encode_chat, render_chat
from reprieve.errors import SpecError
from reprieve.settings import MAX_PROBLEMS, ProblemSettings, PromptSettings
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.answers import THINKING_BEGINS, THINKING_ENDS, after_thinking
from reprieve.tasks.graders import Grader

Message = dict[str, str]  # role and content


class PromptFormat:
    """Formats messages as a prompt, and removes the thinking from responses.

    Args:
        tokenizer: the target's.
        settings: raw, or the chat template with its system prompt and thinking.

    Raises:
        SpecError: a chat template is wanted and the tokenizer has none, or its template fails.
    """

    def __init__(self, tokenizer: Any, settings: PromptSettings | None = None) -> None:
        self.tokenizer = tokenizer
        self.settings = settings or PromptSettings()
        if self.settings.chat_template and not getattr(tokenizer, "chat_template", None):
            raise SpecError("chat_template needs a tokenizer with a chat template; this one has none")
        self._thinks = False
        if self.settings.chat_template:
            opened = self._render([{"role": "user", "content": "?"}]).rstrip()
            self._thinks = self.settings.thinking == "on" or opened.endswith(THINKING_BEGINS)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the model's next turn begins."""
        if not self.settings.chat_template:
            return [int(token) for token in self.tokenizer.encode("\n\n".join(item["content"] for item in messages))]
        return encode_chat(self.tokenizer, self._render(messages))

    def said(self, text: str) -> str | None:
        """Return a response without its thinking; None if the thinking never ended."""
        if self._thinks and not any(mark in text for mark in THINKING_ENDS):
            return None
        return after_thinking(text)

    def next_turn(self, answer: str, message: str) -> list[Message]:
        """Return the model's answer, without its thinking, and the user's next message."""
        said = self.said(answer)
        text = answer if said is None else said.strip()
        return [{"role": "assistant", "content": text}, {"role": "user", "content": message}]

    def _render(self, messages: Sequence[Message]) -> str:
        turns = list(messages)
        if self.settings.system_prompt:
            turns.insert(0, {"role": "system", "content": self.settings.system_prompt})
        given = {} if self.settings.thinking is None else {"enable_thinking": self.settings.thinking == "on"}
        return render_chat(self.tokenizer, turns, **given)


class PromptedTask(Task):
    """A task with its prompts formatted for one model."""

    max_new_tokens = 0  # replaces the property

    def __init__(self, task: Task, prompt_format: PromptFormat, max_new_tokens: int) -> None:
        self.task, self.format, self.max_new_tokens = task, prompt_format, max_new_tokens
        self.name, self.graded, self.splits = task.name, task.graded, task.splits
        self.runs_programs = task.runs_programs
        # Stop texts prevent further worked examples after a raw prompt; a chat ends by itself and may contain them.
        self.stop = tuple(task.chat_stop if prompt_format.settings.chat_template else task.stop)

    @property
    def grader(self) -> Grader:
        return self.task.grader

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        found = self.task.problems(split, limit, offset=offset)
        prompts = [self.format.encode([{"role": "user", "content": problem.prompt}]) for problem in found]
        return [replace(problem, prompt_ids=tuple(ids)) for problem, ids in zip(found, prompts, strict=True)]

    def fit(self, problems: Sequence[TaskProblem], num_positions: int) -> None:
        """Reduce `max_new_tokens` to what fits into the models' context after the longest of these prompts."""
        room = num_positions - max(len(problem.prompt_ids) for problem in problems)
        if 0 < room < self.max_new_tokens:
            warnings.warn(
                f"max_new_tokens is {room} instead of {self.max_new_tokens}: the models read {num_positions} tokens",
                stacklevel=2,
            )
            self.max_new_tokens = room

    def wrap(self, question: str) -> str:
        return self.task.wrap(question)

    def extract_answer(self, text: str) -> str | None:
        said = self.format.said(text)
        return None if said is None else self.task.extract_answer(said)

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        return self.task.equivalent(answer, other)

    def same(self, problem: TaskProblem, answer: str | None, other: str | None) -> bool:
        return self.task.same(problem, answer, other)


def with_prompts(task: Task, tokenizer: Any, settings: PromptSettings | None = None) -> PromptedTask:
    """Return the task with its prompts formatted for the model of a tokenizer.

    Raises:
        SpecError: see `PromptFormat`.
    """
    settings = settings or PromptSettings()
    length = task.max_new_tokens if settings.max_new_tokens is None else settings.max_new_tokens
    return PromptedTask(task, PromptFormat(tokenizer, settings), length)


def problems_of(task: Task, chosen: ProblemSettings, num_positions: int | None) -> list[TaskProblem]:
    """Return the chosen problems of a task; its answers are shortened to what fits into the models' context.

    Args:
        num_positions: tokens that the models read; None if unknown.

    Raises:
        SpecError: a split without problems, or an offset beyond them.
    """
    problems = task.problems(chosen.split, chosen.limit, offset=chosen.offset)
    if not problems:
        raise SpecError(_no_problems(task, chosen.split, chosen.offset))
    if isinstance(task, PromptedTask) and num_positions is not None:
        task.fit(problems, num_positions)
    return problems


def _no_problems(task: Task, split: str, offset: int) -> str:
    """Return why there are no problems: an offset beyond them, or a split that is empty."""
    sizes = {name: len(task.problems(name, MAX_PROBLEMS)) for name in task.splits}
    if size := sizes.get(split, 0):
        return f"offset must be below the {size} problems in split {split!r} of task {task.name}, got {offset}"
    filled = [f"{size} in {name!r}" for name, size in sizes.items() if size and name != "all"]
    others = ", ".join(filled) or "none anywhere"
    return f"split {split!r} of task {task.name} holds no problems; there are {others}"


def prompt_ids_of(problem: TaskProblem, tokenizer: Any) -> list[int]:
    """Return the tokens of a problem's prompt; its raw text is tokenized if it is not formatted for a model yet."""
    return list(problem.prompt_ids) or list(tokenizer.encode(problem.prompt))
