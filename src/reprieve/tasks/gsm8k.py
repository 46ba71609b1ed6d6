"""GSM8K: grade-school word problems, from JSONL files or the hub; answers compared as expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, SpecError, import_extra, require_choice
from reprieve.tasks.base import TaskProblem
from reprieve.tasks.expressions import same_expression

_SPLITS = ("train", "test")
_PHRASE = re.compile(r"final answer is:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(\s|$)|\n")
_ANNOTATION = re.compile(r"<<[^>]*>>")
_INSTRUCTION = 'Solve the problem step by step. End with "The final answer is" and the answer.\n\n'


@dataclass
class Gsm8kTask:
    """Cobbe et al., 2021: 7,473 training and 1,319 test problems.

    Args:
        path: a JSONL file with `question` and `answer`; `{split}` in it stands for train or test. None for the hub.
        shots: worked training problems before each question, 0 to 64.
    """

    path: str | None = None
    shots: int = 0

    name: str = field(default="gsm8k", init=False)
    splits: tuple[str, ...] = field(default=_SPLITS, init=False)
    max_new_tokens: int = field(default=512, init=False)
    stop: tuple[str, ...] = field(default=("\nProblem:",), init=False)
    _loaded: dict[str, list[tuple[str, str]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.shots <= 64:
            raise SpecError(f"shots must be in [0, 64], got {self.shots}")

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, _SPLITS)
        rows = self._rows(split)[offset : offset + limit]
        return [
            TaskProblem(f"gsm8k-{split}-{offset + number}", self.wrap(question), _reference(solution))
            for number, (question, solution) in enumerate(rows)
        ]

    def wrap(self, question: str) -> str:
        worked = "".join(f"Problem: {shown}\nSolution: {_worked(solution)}\n\n" for shown, solution in self._examples())
        return f"{_INSTRUCTION}{worked}Problem: {question.strip()}\nSolution:"

    def extract_answer(self, text: str) -> str | None:
        after = _PHRASE.split(text)[1:]
        return _SENTENCE_END.split(after[-1].strip())[0].strip(" *") or None if after else None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        return answer is not None and other is not None and same_expression(answer, other)

    def _examples(self) -> Sequence[tuple[str, str]]:
        return self._rows("train")[: self.shots] if self.shots else ()

    def _rows(self, split: str) -> list[tuple[str, str]]:
        if split not in self._loaded:
            rows = _from_hub(split) if self.path is None else read_jsonl(Path(self.path.replace("{split}", split)))
            try:
                self._loaded[split] = [(str(row["question"]), str(row["answer"])) for row in rows]
            except KeyError as missing:
                raise ReprieveError(f"task gsm8k: {self.path} has a line without {missing}") from None
        return self._loaded[split]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a file, one a line.

    Raises:
        ReprieveError: the file cannot be read, or a line is no JSON object; names both.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ReprieveError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ReprieveError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ReprieveError(f"{path}, line {number}: must be an object, got {type(row).__name__}")
        rows.append(row)
    return rows


def _from_hub(split: str) -> list[dict[str, Any]]:
    datasets = import_extra("datasets", "tasks")
    try:
        return list(datasets.load_dataset("openai/gsm8k", "main", split=split))
    except Exception as error:  # no network, no such data set: the hub has many ways to say it
        raise ReprieveError(
            f"task gsm8k could not be loaded from the hub ({error}); give a file: gsm8k:path=gsm8k_{{split}}.jsonl"
        ) from None


def _reference(solution: str) -> str:
    return solution.rpartition("####")[2].strip().replace(",", "")


def _worked(solution: str) -> str:
    steps = _ANNOTATION.sub("", solution.rpartition("####")[0]).strip()
    return f"{steps}\nThe final answer is {_reference(solution)}."
