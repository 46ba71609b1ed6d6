"""GSM8K: grade-school word problems, with worked examples or other questions before each of them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from reprieve.errors import SpecError
from reprieve.settings import MAX_PROBLEMS
from reprieve.tasks import TaskProblem, register_task
from reprieve.tasks.graders import Grader, NumberGrader
from reprieve.tasks.table import ALL, TableTask, UnreadReferenceError, text_of

_ANNOTATION = re.compile(r"<<[^>]*>>")
_INSTRUCTION = 'Solve the problem step by step. End with "The final answer is" and the answer.\n\n'


@register_task
@dataclass
class Gsm8kTask(TableTask):
    """Cobbe et al., 2021: 7,473 training and 1,319 test problems.

    The data has no validation split. A fifth of the training problems, chosen by a hash of the question, is the
    validation split, and the others are the train split. If a validation file exists, each split is read from its file.
    A single file is divided as for `TableTask`.

    Args:
        path: a JSONL file with `question` and `answer`; `{split}` in it stands for train, test, or validation where
            there is such a file. None for the hub.
        length: largest answer, in tokens.
        shots: worked training problems before each question, 0 to 64.
        context: unsolved training questions at the start of the prompt: AutoJudge's long-context benchmark has 250
            (appendix M.2). Drawn for each question separately; the same question always gets the same ones.
    """

    length: int = 512
    shots: int = 0
    context: int = 0

    hub: ClassVar[Any] = ("openai/gsm8k", "main", {"train": "train", "test": "test"})
    name: str = field(default="gsm8k", init=False)
    stop: tuple[str, ...] = field(default=("\nProblem:",), init=False)
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.shots <= 64:
            raise SpecError(f"shots must be in [0, 64], got {self.shots}")
        if not 0 <= self.context <= 5000:
            raise SpecError(f"context must be in [0, 5000], got {self.context}")

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        rows = super().problems(split, limit, offset=offset)
        names = [f"gsm8k-{split}-{number}" for number in range(offset, offset + len(rows))]
        if self._divided:  # numbers would change with the file
            names = [row.problem_id for row in rows]
        return [
            TaskProblem(name, self.wrap(row.question), _result(row.reference), question=row.question)
            for name, row in zip(names, rows, strict=True)
        ]

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        """The problem of a row, with the solution as its reference and no prompt yet: long ones would fill memory."""
        question, solution = text_of(row, "question", where), text_of(row, "answer", where)
        if "####" not in solution:
            raise UnreadReferenceError(
                f"task gsm8k: {where}: answer must end in #### and the result, got {solution[-40:]!r}"
            )
        return TaskProblem(self.named(question), question, solution, question=question)

    def wrap(self, question: str) -> str:
        worked = ""
        if self.shots:
            others = [row for row in self._training_rows[: self.shots + 1] if row.question != question]
            for other in others[: self.shots]:
                worked += f"Problem: {other.question}\nSolution: {_worked(other.reference)}\n\n"
        return f"{self._context(question)}{_INSTRUCTION}{worked}Problem: {question.strip()}\nSolution:"

    def _context(self, question: str) -> str:
        """Return other questions as distracting context."""
        if not self.context:
            return ""
        others = [row.question for row in self._training_rows if row.question != question]
        if len(others) < self.context:
            raise SpecError(f"context must be at most the {len(others)} other training questions, got {self.context}")
        chosen = random.Random(question).sample(others, self.context)  # seeded by the text
        return "".join(f"Problem: {other.strip()}\n\n" for other in chosen)

    @property
    def _divided(self) -> bool:
        """True for a single file, whose splits are shares of it."""
        return bool(self.path) and "{split}" not in str(self.path)

    @cached_property
    def _training_rows(self) -> list[TaskProblem]:
        """The data's own training split; of a single file, its share for training."""
        return super().problems("train", MAX_PROBLEMS) if self._divided else self.of_own_split("train")

    def portions(self) -> dict[str, tuple[str, range]]:
        path = self.path or ""
        if self._divided:
            return super().portions()
        if path and Path(path.replace("{split}", "validation")).is_file():
            return {split: (split, ALL) for split in ("train", "validation", "test")}
        return {"train": ("train", range(20, 100)), "validation": ("train", range(20)), "test": ("test", ALL)}


def _result(solution: str) -> str:
    return solution.rpartition("####")[2].strip().replace(",", "")


def _worked(solution: str) -> str:
    steps = _ANNOTATION.sub("", solution.rpartition("####")[0]).strip()
    return f"{steps}\nThe final answer is {_result(solution)}."
