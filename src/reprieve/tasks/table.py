"""Base of tasks from files and data sets: rows, splits, and problems identified by their questions."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from reprieve.errors import ReprieveError, import_extra, require_choice
from reprieve.tasks.base import FileTask, TaskProblem, problem_digest
from reprieve.tasks.jsonl import read_jsonl

CARVED = ("train", "validation", "test", "all")
_ALL, _TRAIN, _VALIDATION = range(100), range(80), range(80, 100)  # per cent, by a hash of the question
_SHARES = {"train": range(60), "validation": range(60, 80), "test": range(80, 100), "all": _ALL}


class UnreadReferenceError(ReprieveError):
    """A row whose right answer the grader cannot read; the row is left out."""


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

    # Data set, configuration (with `{name}` for a parameter of the task), and its split by ours.
    hub: ClassVar[tuple[str, str | None, dict[str, str]] | None] = None
    graded: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=CARVED, init=False)
    _loaded: dict[str, list[TaskProblem]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path or "all" in self._own_splits:
            self.splits = CARVED
        else:
            more = ("validation",) if "train" in self._own_splits and "validation" not in self._own_splits else ()
            self.splits = (*self._own_splits, *more)

    @property
    def needs_path(self) -> bool:  # type: ignore[override]
        return self.hub is None

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, self.splits)
        return self._of_split(split)[offset : offset + limit]

    @abstractmethod
    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        """The problem of a row.

        Args:
            where: names the row in messages.

        Raises:
            ReprieveError: a field is missing, or of another type.
        """

    def _of_split(self, split: str) -> list[TaskProblem]:
        own, shares = self._portion(split)
        if own not in self._loaded:
            self._loaded[own] = self._read(own)
        problems = self._loaded[own]
        return problems if shares == _ALL else [one for one in problems if int(one.digest, 16) % 100 in shares]

    def _portion(self, split: str) -> tuple[str, range]:
        """Return the data's own split that holds a split, "" if it has none, and the share of its questions by hash."""
        if self.path:
            return (split, _ALL) if "{split}" in self.path else ("", _SHARES[split])
        own = self._own_splits
        if "all" in own:
            return own["all"], _SHARES[split]
        if "validation" not in own and split in ("train", "validation"):
            return own["train"], _TRAIN if split == "train" else _VALIDATION
        return own[split], _ALL

    @property
    def _own_splits(self) -> dict[str, str]:
        """The names that the hub's data has for our splits."""
        assert self.hub is not None
        return self.hub[2]

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
            raise ReprieveError(
                f"task {self.name} could not be loaded from the hub ({error}); give a file: {self.name}:path=FILE.jsonl"
            ) from None
        return [(row, f"{name}, row {number}") for number, row in enumerate(rows)]

    def _source(self, split: str) -> str:
        return self.path.replace("{split}", split) if self.path else str(self.hub and self.hub[0])

    def named(self, question: str) -> str:
        """Return an identifier of a question that does not depend on the rest of the file."""
        return f"{self.name}-{problem_digest(question)[:10]}"


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
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ReprieveError(f"{where}: field {name!r} must be a text or a number, got {value!r}")
    return str(value)
