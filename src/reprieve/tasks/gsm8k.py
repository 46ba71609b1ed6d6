"""GSM8K: grade-school word problems, from JSONL files or the hub; answers compared as expressions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, SpecError, import_extra, require_choice
from reprieve.tasks.base import Task, TaskProblem, problem_digest, register_task
from reprieve.tasks.graders import Grader, NumberGrader
from reprieve.tasks.jsonl import read_jsonl

_SPLITS = ("train", "validation", "test")
_VALIDATION = 20  # per cent of the training problems, by a hash of the question
_ANNOTATION = re.compile(r"<<[^>]*>>")
_INSTRUCTION = 'Solve the problem step by step. End with "The final answer is" and the answer.\n\n'


@register_task
@dataclass
class Gsm8kTask(Task):
    """Cobbe et al., 2021: 7,473 training and 1,319 test problems.

    The data has no validation split. A fifth of the training problems, chosen by a hash of the question, is the
    validation split, and the others are the train split. If a validation file exists, each split is read from its file.

    Args:
        path: a JSONL file with `question` and `answer`; `{split}` in it stands for train, test, or validation where
            there is such a file. None for the hub.
        shots: worked training problems before each question, 0 to 64.
        context: unsolved training questions at the start of the prompt: AutoJudge's long-context benchmark has 250
            (appendix M.2). Drawn for each question separately; the same question always gets the same ones.
    """

    path: str | None = None
    shots: int = 0
    context: int = 0

    name: str = field(default="gsm8k", init=False)
    graded: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=_SPLITS, init=False)
    max_new_tokens: int = field(default=512, init=False)
    stop: tuple[str, ...] = field(default=("\nProblem:",), init=False)
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)
    _loaded: dict[str, list[tuple[str, str]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.shots <= 64:
            raise SpecError(f"shots must be in [0, 64], got {self.shots}")
        if not 0 <= self.context <= 5000:
            raise SpecError(f"context must be in [0, 5000], got {self.context}")

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, _SPLITS)
        rows = self._rows(split)[offset : offset + limit]
        return [
            TaskProblem(
                f"gsm8k-{split}-{offset + number}", self.wrap(question), _reference(solution), question=question
            )
            for number, (question, solution) in enumerate(rows)
        ]

    def wrap(self, question: str) -> str:
        shown = self._examples(question)
        worked = "".join(f"Problem: {other}\nSolution: {_worked(solution)}\n\n" for other, solution in shown)
        return f"{self._context(question)}{_INSTRUCTION}{worked}Problem: {question.strip()}\nSolution:"

    def _examples(self, question: str) -> Sequence[tuple[str, str]]:
        """Return the first training problems, without the question itself."""
        if not self.shots:
            return ()
        others = [row for row in self._read("train")[: self.shots + 1] if row[0] != question]
        return others[: self.shots]

    def _context(self, question: str) -> str:
        """Return other questions as distracting context."""
        if not self.context:
            return ""
        others = [row[0] for row in self._read("train") if row[0] != question]
        if len(others) < self.context:
            raise SpecError(f"context must be at most the {len(others)} other training questions, got {self.context}")
        chosen = random.Random(question).sample(others, self.context)  # seeded by the text
        return "".join(f"Problem: {other.strip()}\n\n" for other in chosen)

    def _rows(self, split: str) -> list[tuple[str, str]]:
        if split == "test" or self._has_validation:
            return self._read(split)
        validation = split == "validation"
        return [row for row in self._read("train") if _is_validation(row[0]) == validation]

    @property
    def _has_validation(self) -> bool:
        """True if validation problems have a file of their own."""
        path = self.path or ""
        return "{split}" in path and Path(path.replace("{split}", "validation")).is_file()

    def _read(self, split: str) -> list[tuple[str, str]]:
        if split not in self._loaded:
            if self.path is None:
                rows = list(enumerate(_from_hub(split), start=1))
            else:
                rows = read_jsonl(Path(self.path.replace("{split}", split)))
            self._loaded[split] = [_checked(row, f"{self.path or 'openai/gsm8k'}, line {line}") for line, row in rows]
        return self._loaded[split]


def _is_validation(question: str) -> bool:
    return int(problem_digest(question), 16) % 100 < _VALIDATION


def _from_hub(split: str) -> list[dict[str, Any]]:
    datasets = import_extra("datasets", "tasks")
    try:
        return list(datasets.load_dataset("openai/gsm8k", "main", split=split))
    except Exception as error:  # no network, or no such data set: the hub raises many kinds of errors
        raise ReprieveError(
            f"task gsm8k could not be loaded from the hub ({error}); give a file: gsm8k:path=gsm8k_{{split}}.jsonl"
        ) from None


def _checked(row: dict[str, Any], where: str) -> tuple[str, str]:
    if missing := {"question", "answer"} - row.keys():
        raise ReprieveError(
            f"task gsm8k: {where} must have question and answer, {', '.join(sorted(missing))} is missing"
        )
    question, answer = str(row["question"]), str(row["answer"])
    if "####" not in answer:
        raise ReprieveError(f"task gsm8k: {where}: answer must end in #### and the result, got {answer[-40:]!r}")
    return question, answer


def _reference(solution: str) -> str:
    return solution.rpartition("####")[2].strip().replace(",", "")


def _worked(solution: str) -> str:
    steps = _ANNOTATION.sub("", solution.rpartition("####")[0]).strip()
    return f"{steps}\nThe final answer is {_reference(solution)}."
