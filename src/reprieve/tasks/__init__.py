"""Tasks: problems, prompts and grading, for mining, training and evaluation.

By name: `arithmetic`, `gsm8k:path=gsm8k_{split}.jsonl,shots=8`, `prompts:path=file.jsonl`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from reprieve.errors import SpecError
from reprieve.specs import Registry
from reprieve.tasks.graders import GRADERS, Grader, register_grader


@dataclass(frozen=True)
class TaskProblem:
    """One problem.

    Args:
        prompt: the first message to the model, as text.
        reference: the answer that graders compare with.
        follow_ups: the user's later turns.
        question: the question without instructions and worked examples; empty if the prompt is the bare question.
        prompt_ids: tokens of the prompt, once it is formatted for a model (`reprieve.tasks.prompting`).
    """

    problem_id: str
    prompt: str
    reference: str
    follow_ups: tuple[str, ...] = ()
    category: str = ""
    question: str = ""
    prompt_ids: tuple[int, ...] = ()

    @property
    def question_text(self) -> str:
        """The question alone, for judges and for telling problems apart."""
        return self.question or self.prompt

    @property
    def digest(self) -> str:
        """Identifies the problem by its question, whatever its number and its line in a file."""
        return problem_digest(self.question_text)


def problem_digest(question: str) -> str:
    """Return 16 hexadecimal digits that identify a question; outer and repeated whitespace is ignored."""
    return hashlib.blake2b(" ".join(question.split()).encode(), digest_size=8).hexdigest()


class Task(Protocol):
    """The interface of a task: problems, prompts and grading."""

    name: str
    graded: bool = True  # whether answers can be compared; otherwise only a judge can compare responses
    splits: tuple[str, ...]
    stop: tuple[str, ...]  # texts that end an answer to a raw prompt
    chat_stop: tuple[str, ...] = ()  # texts that end an answer in a chat
    runs_programs: bool = False  # whether grading waits for other processes

    @property
    def grader(self) -> Grader:
        """Reads and compares answers, where the task does not do so itself."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Budget of an answer."""
        ...

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        """Problems `offset` to `offset + limit` of a split; always the same ones, whatever the run's seed."""
        ...

    def wrap(self, question: str) -> str:
        """Return the prompt of this task for a bare question."""
        ...

    def extract_answer(self, text: str) -> str | None:
        """The final answer in a response, or None where it gives none."""
        return self.grader.extract(text)

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        """Return whether two extracted answers are the same; an absent answer equals nothing."""
        return self.grader.equivalent(answer, other)

    def same(self, problem: TaskProblem, answer: str | None, other: str | None) -> bool:
        """Return whether two answers to a problem are equally good, right or wrong; used by mining."""
        return self.equivalent(answer, other)


async def run_comparison(task: Task, compare: Callable[..., bool], *given: Any) -> bool:
    """Return the result of `compare`, run in a thread if the task runs programs, so that other answers can proceed."""
    if task.runs_programs:
        return await asyncio.to_thread(compare, *given)
    return compare(*given)


TASKS: Registry[Task] = Registry("task", "reprieve.tasks")
register_task = TASKS.register


def load_task(spec: str) -> Task:
    """Return the task that a specification names.

    Raises:
        SpecError: unknown name or setting, or a class that does not derive from `Task`.
    """
    task = TASKS.make(spec)
    if Task not in type(task).__mro__:
        raise SpecError(f"task {spec!r}: its class {type(task).__name__} must derive from reprieve.tasks.Task")
    return task


__all__ = ["GRADERS", "TASKS", "Grader", "Task", "TaskProblem", "load_task", "register_grader", "register_task"]
