"""Tasks from files and data sets: rows, splits, and problems identified by their questions."""

from __future__ import annotations

import json
import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from reprieve.errors import ReprieveError, SpecError, import_extra, require_choice, require_whole
from reprieve.files import parse_json, read_file
from reprieve.tasks import Task, TaskProblem, problem_digest, register_task
from reprieve.tasks.answers import final_answer
from reprieve.tasks.graders import JUDGE, FunctionGrader, make_grader

_LARGEST = 4 << 30  # bytes of a file
ALL = range(100)  # per cent of the questions, by a hash of the question
_SHARES = {"train": range(60), "validation": range(60, 80), "test": range(80, 100), "all": ALL}
_STEPS = '{question}\n\nReason step by step. End with "The final answer is" and the answer.'
_TEMPLATES = {"number": _STEPS, "math": _STEPS}


class UnreadReferenceError(ReprieveError):
    """A row whose right answer the grader cannot read; the row is left out."""


@dataclass
class FileTask(Task):
    """Base of tasks from a file.

    Args:
        path: the JSONL file, plain or gzipped.
        length: largest answer, in tokens.
    """

    path: str | None = None
    length: int = 512

    # Data set on the hub, configuration (with `{name}` for a parameter of the task), and its split by ours.
    hub: ClassVar[tuple[str, str | None, dict[str, str]] | None] = None
    stop: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if not self.path and self.hub is None:
            raise SpecError(f"task {self.name} needs path=FILE.jsonl")
        require_whole("length", self.length, 1)

    @property
    def max_new_tokens(self) -> int:
        return self.length

    def wrap(self, question: str) -> str:
        return question


@dataclass
class TableTask(FileTask):
    """Problems from the rows of a JSONL file, or of a data set on the hub.

    If the data has no splits, a hash of the question assigns them: 60% train, 20% validation, 20% test. If a data set
    on the hub has train but no validation, a fifth of train is the validation split. A problem stays in its split when
    the file grows, and repeated questions are skipped.

    Args:
        path: a JSONL file, plain or gzipped; `{split}` in it stands for the split. None for the hub's, if there is one.
        length: largest answer, in tokens.
    """

    length: int = 1024

    graded: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=(), init=False)
    _loaded: dict[str, list[TaskProblem]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.splits = tuple(self.portions())

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, self.splits)
        own, shares = self.portions()[split]
        found = self.of_own_split(own)
        if shares != ALL:
            found = [problem for problem in found if int(problem.digest, 16) % 100 in shares]
        return found[offset : offset + limit]

    @abstractmethod
    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        """The problem of a row.

        Args:
            where: names the row in messages.

        Raises:
            ReprieveError: a field is missing, or of another type.
        """

    def portions(self) -> dict[str, tuple[str, range]]:
        """Return for each split the data's own split that holds it, "" if it has none, and its share by hash."""
        if self.path:
            return {split: (split, ALL) if "{split}" in self.path else ("", _SHARES[split]) for split in _SHARES}
        assert self.hub is not None
        own = self.hub[2]
        if "all" in own:
            return {split: (own["all"], share) for split, share in _SHARES.items()}
        found = {split: (name, ALL) for split, name in own.items()}
        if "train" in own and "validation" not in own:
            found |= {"train": (own["train"], range(80)), "validation": (own["train"], range(80, 100))}
        return found

    def of_own_split(self, split: str) -> list[TaskProblem]:
        """Return all problems of one of the data's own splits, in order, read once."""
        if split not in self._loaded:
            self._loaded[split] = self._read(split)
        return self._loaded[split]

    def _read(self, split: str) -> list[TaskProblem]:
        problems: dict[str, TaskProblem] = {}
        repeated = contradicted = 0
        refused: list[UnreadReferenceError] = []
        for row, where in self._rows(split):
            try:
                problem = self.problem_of(row, where)
            except UnreadReferenceError as error:
                refused.append(error)
                continue
            first = problems.setdefault(problem.digest, problem)
            repeated += first is not problem
            contradicted += first.reference != problem.reference
        if refused and len(refused) >= max(1, len(problems)):
            raise refused[0]
        if refused:
            warnings.warn(
                f"task {self.name}: {len(refused)} rows of {self._source(split)} are left out; the first: {refused[0]}",
                stacklevel=5,
            )
        if not problems:
            raise ReprieveError(f"task {self.name}: {self._source(split)} holds no problems")
        if repeated:
            warnings.warn(
                f"task {self.name}: {repeated} rows of {self._source(split)} repeat a question and are left out"
                + (f"; {contradicted} of them give another answer" if contradicted else ""),
                stacklevel=5,
            )
        return list(problems.values())

    def _rows(self, split: str) -> list[tuple[dict[str, Any], str]]:
        source = self._source(split)
        if self.path:
            return [(row, f"{source}, line {line}") for line, row in read_jsonl(Path(source))]
        assert self.hub is not None
        name, configuration, _ = self.hub
        datasets = import_extra("datasets", "tasks")
        try:
            rows = list(datasets.load_dataset(name, configuration and configuration.format(**vars(self)), split=split))
        except Exception as error:  # no network, no such data set: the hub has many ways to say it
            file = f"{self.name}_{{split}}.jsonl" if len(self.hub[2]) > 1 else "FILE.jsonl"
            raise ReprieveError(
                f"task {self.name} could not be loaded from the hub ({error}); give a file: {self.name}:path={file}"
            ) from None
        return [(row, f"{name}, row {number}") for number, row in enumerate(rows)]

    def _source(self, split: str) -> str:
        return self.path.replace("{split}", split) if self.path else str(self.hub and self.hub[0])

    def named(self, question: str) -> str:
        """Return an identifier of a question that does not depend on the rest of the file."""
        return f"{self.name}-{problem_digest(question)[:10]}"


@register_task
@dataclass
class JsonlTask(TableTask):
    """Questions and answers of your own, a JSON object a line.

    Args:
        question, answer: the fields that hold them; `a.b` is the field b of the object a. With grader=judge, no
            answers are needed.
        grader: exact, number, math, choice, or another package's; `regex:PATTERN`, whose last match in the response
            (its first group, if it has one) is the answer; `python:FILE.py:FUNCTION`, called with a response and the
            row's answer to say whether it is right, or with the response alone to give its answer; or judge: a
            language model compares responses.
        template: a text file with `{question}` in it: the prompt. By default the question, and for number and math a
            line that asks for reasoning and a final answer.
        stop: texts that end a response, separated by `;`, with `\\n` for a line's end.
    """

    question: str = "question"
    answer: str = "answer"
    grader: str = "math"  # type: ignore[assignment]  # a name, until it is made
    template: str | None = None
    stop: str | tuple[str, ...] = ""  # type: ignore[assignment]

    name: str = field(default="jsonl", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str):
            self.stop = tuple(text.replace("\\n", "\n") for text in self.stop.split(";") if text)
        self.chat_stop = self.stop
        self._judged = self.grader == JUDGE
        self.graded = not self._judged
        self._prompt = _read_template(self.template) if self.template else _TEMPLATES.get(self.grader, "{question}")
        self.grader = make_grader("exact" if self._judged else self.grader)  # type: ignore[assignment]

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question = text_of(row, self.question, where)
        reference = "" if self._judged else self._reference(text_of(row, self.answer, where), where)
        return TaskProblem(self.named(question), self.wrap(question), reference, question=question)

    def _reference(self, written: str, where: str) -> str:
        """Return the right answer as the grader reads it; `written` can be a whole solution, as in GSM8K and MATH.

        Raises:
            UnreadReferenceError: the grader finds no answer in it, so every response would count as wrong.
        """
        grader: Any = self.grader
        name = grader.name
        if name in ("number", "choice"):
            reference = grader.extract(written) or grader.extract(f"The answer is {written.strip()}")
        elif name == "math":
            reference = final_answer(written) or written.strip()
        else:
            return written.strip()
        if not reference or not grader.equivalent(reference, reference):
            raise UnreadReferenceError(
                f"{where}: grader {name} finds no answer in field {self.answer!r}, got {written[:60]!r}"
            )
        return str(reference)

    def wrap(self, question: str) -> str:
        return self._prompt.replace("{question}", question.strip())

    def same(self, problem: TaskProblem, answer: str | None, other: str | None) -> bool:
        """Return whether two answers are equal, or get the same verdict from a grading function."""
        if isinstance(self.grader, FunctionGrader) and self.grader.compares:
            if answer is None or other is None:
                return False
            reference = problem.reference
            return answer == other or self.equivalent(answer, reference) == self.equivalent(other, reference)
        return self.equivalent(answer, other)


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file, plain or gzipped, one a line; empty lines are passed over.

    Raises:
        ReprieveError: the file cannot be read, or a line is no JSON object; names both.
    """
    try:
        content = read_file(path, "the file", most=_LARGEST)
        lines = content.decode("utf-8-sig").split("\n")  # a string may hold other line separators
    except UnicodeDecodeError as error:
        raise ReprieveError(f"{str(path)!r} must be UTF-8: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, unique=True)
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ReprieveError(f"{path}, line {number}: holds half of a surrogate pair, which is not text") from None
        except ValueError as error:
            raise ReprieveError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ReprieveError(f"{path}, line {number}: must be an object, got {type(row).__name__}")
        rows.append((number, row))
    return rows


def text_of(row: dict[str, Any], name: str, where: str) -> str:
    """A field of a row, as text; `a.b` is the field b of the object a.

    Raises:
        ReprieveError: it is missing or empty, or no text and no number.
    """
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ReprieveError(f"{where}: field {name!r} is missing; it has {', '.join(map(str, row))}")
        value = value[part]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not (isinstance(value, str) and value.strip()):
        raise ReprieveError(f"{where}: field {name!r} must be a text or a number, got {value!r}")
    return str(value)


def _read_template(path: str) -> str:
    try:
        text = read_file(path, "template", most=1 << 20).decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"template {path!r} must be UTF-8: {error}") from None
    except ReprieveError as error:
        raise SpecError(str(error)) from None
    if "{question}" not in text:
        raise SpecError(f"template {path!r} must hold {{question}} where the question goes")
    return text
