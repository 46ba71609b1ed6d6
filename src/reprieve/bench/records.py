"""Records of a run: one line per problem and arm, written at once and read again to resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.errors import ReprieveError
from reprieve.files import append_line, first_difference, open_folder, read_json, read_records, replace_file
from reprieve.types import DecodingStats

if TYPE_CHECKING:
    from filelock import FileLock

_ANSWERS = "problems.jsonl"


@dataclass(frozen=True, kw_only=True)
class Reply(DecodingStats):
    """An engine's answer to one prompt, or to the turns of a conversation."""

    text: str
    finish_reason: str  # eos, stop, length or error
    spans: list[list[Any]] = field(default_factory=list)  # [characters, t, m or r]: who proposed `text`


@dataclass(frozen=True, kw_only=True)
class ProblemRecord(Reply):
    """One arm's reply to one problem, graded."""

    arm: str
    problem_id: str
    trial: int = 0  # 0 to num_trials - 1; each has draws of its own
    correct: bool
    answer: str | None
    error: str | None = None
    turns: list[str] = field(default_factory=list)  # the answers of a conversation of several turns

    @property
    def cut_off(self) -> bool:
        """True if the answer reached its largest length."""
        return self.finish_reason == "length"

    @property
    def finished(self) -> bool:
        """True if the answer ended by itself."""
        return self.error is None and not self.cut_off

    @property
    def unread(self) -> bool:
        """True if the answer ended by itself but holds no final answer: counted as wrong, and reported separately."""
        return self.answer is None and self.finished


class RecordFile:
    """`problems.jsonl`: append-only. A line cut off by a kill is dropped when the file is opened again."""

    def __init__(self, path: Path, lock: FileLock | None = None) -> None:
        self.path = path
        self._lock = lock  # held as long as this is
        self.records = self._read()

    def append(self, record: ProblemRecord) -> None:
        """Write one line and flush it."""
        append_line(self.path, asdict(record), f"the {len(self.records)} answers before it")
        self.records.append(record)

    def _read(self) -> list[ProblemRecord]:
        return list(read_records(self.path, ProblemRecord, "problem record", repair=self._lock is not None))


def read_answers(folder: Path) -> list[ProblemRecord]:
    """Return a run's answers, from `problems.jsonl` or the `problems.jsonl.gz` of an archived run; [] without either.

    Raises:
        ReprieveError: a line that cannot be read.
    """
    archived = folder / f"{_ANSWERS}.gz"
    return RecordFile(archived if archived.is_file() else folder / _ANSWERS).records


def read_run(folder: Path) -> dict[str, Any]:
    """A run's configuration.

    Raises:
        ReprieveError: the folder holds none, or one that cannot be read.
    """
    path = folder / "run.json"
    document = read_json(path, "the run")
    if not isinstance(document, dict):
        raise ReprieveError(f"{str(path)!r} must hold an object, got {type(document).__name__}")
    return document


def claim_run(folder: Path, configuration: Mapping[str, Any], *, extendable: tuple[str, ...] = ()) -> RecordFile:
    """Open a run's folder. If it has no answers, store the configuration; otherwise the stored one must be equal.

    A larger `limit` extends an old run.

    Args:
        extendable: names of list or dictionary settings that are merged with the stored ones.

    Raises:
        ReprieveError: the folder holds an archived run, or another run; the message names the first setting that
            differs.
    """
    lock = open_folder(folder)
    path, answers = folder / "run.json", folder / _ANSWERS
    if (folder / f"{_ANSWERS}.gz").exists():
        raise ReprieveError(
            f"--out {str(folder)!r} holds an archived run, which cannot be extended; name another folder"
        )
    wanted = json.loads(json.dumps(configuration))
    if answers.exists() and answers.stat().st_size > 0:
        if not path.exists():
            raise ReprieveError(f"--out {str(folder)!r} has a {_ANSWERS} but no run.json; name another folder")
        before = read_run(folder)
        extended, wanted = _extended(before, wanted, extendable, path)
        if (key := first_difference(wanted, extended)) is not None:
            raise ReprieveError(
                f"--out {str(folder)!r} holds another run, with {key} = {before.get(key)!r} instead of "
                f"{wanted.get(key)!r}; name another folder, or use the same settings to resume"
            )
        wanted = extended
    replace_file(path, json.dumps(wanted, indent=2) + "\n")
    return RecordFile(answers, lock)


def _extended(
    before: Mapping[str, Any], wanted: Mapping[str, Any], extendable: tuple[str, ...], path: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Extend a stored and a wanted configuration by each other, where that is allowed: equal unless they conflict.

    A wanted limit may be larger; lists and dictionaries of extendable settings are merged; the stored command remains.
    """
    extended, asked = dict(before), {**wanted, "command": before.get("command")}
    if isinstance(before.get("limit"), int) and before["limit"] < wanted.get("limit", 0):
        extended["limit"] = wanted["limit"]  # the problems of a smaller limit come first
    for key in extendable:
        old, new = before.get(key) or type(wanted[key])(), wanted[key]
        if type(old) is not type(new):
            raise ReprieveError(f"{str(path)!r} must hold {key} as a {type(new).__name__}, got {old!r}")
        if isinstance(new, dict):
            extended[key], asked[key] = {**new, **old}, {**old, **new}
        else:
            extended[key] = asked[key] = [*old, *(item for item in new if item not in old)]
    return extended, asked
