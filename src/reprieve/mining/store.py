"""The label store: append-only Parquet shards, a journal of them, and a manifest, in one folder.

Every finished problem is a shard of its own, written to a temporary name and renamed, so that a run killed at any
moment loses only the problems in hand. A run that ends in good order folds its shards into one. Workers claim problems
by file locks, which the system releases when a process dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, import_extra
from reprieve.files import read_json, replace_file, sweep
from reprieve.heads.binding import PairIdentity
from reprieve.mining.records import ProblemLabels
from reprieve.mining.shards import Shards
from reprieve.tasks.answers import ANSWERS_VERSION

SCHEMA = 1
_MANIFEST = "manifest.json"
# Tasks whose answers all versions of the reader read alike.
_READ_ALIKE = ("arithmetic", "humaneval", "livecodebench", "prompts")
API_WEIGHTS = "api:"  # begins the target's fingerprint where its weights were never seen


class LabelStore:
    """A folder of labels that were all made in the same way.

    Args:
        folder: where; made if it is not there.
        manifest: what the labels are for (pair, tokenizer, task, miner and its settings). A store that exists must
            have been made with the same. None opens an existing store as it is.

    Raises:
        ReprieveError: no store there, or one made for something else; the message names the first difference.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._shards = Shards(folder)
        self._done: set[str] = set()
        self._read_shards: set[str] = set()
        path = folder / _MANIFEST
        if manifest is None:
            if not path.exists():
                raise ReprieveError(f"{str(folder)!r} is not a label store: it has no {_MANIFEST}")
            self.manifest = _read_manifest(path)
            if (version := self.manifest["answers"]) != ANSWERS_VERSION:
                warnings.warn(
                    f"label store {str(folder)!r} was made by version {version} of the answer reader, this is version "
                    f"{ANSWERS_VERSION}: it may have taken different answers for equal ones; mine it anew",
                    stacklevel=2,
                )
            return
        self.manifest = _complete({"schema": SCHEMA, **json.loads(json.dumps(manifest))})
        if (folder / "run.json").exists() and not path.exists():
            raise ReprieveError(f"{str(folder)!r} holds a run's answers, no labels: name another folder")
        try:
            (folder / "shards").mkdir(parents=True, exist_ok=True)
            (folder / "claims").mkdir(exist_ok=True)
        except OSError as error:
            raise ReprieveError(f"label store {str(folder)!r} cannot be made: {error.strerror}") from None
        with _file_lock(folder / "claims" / ".manifest.lock"):
            if path.exists():
                self._require_same(_read_manifest(path))
            else:
                replace_file(path, json.dumps(self.manifest, indent=2) + "\n")
            sweep(folder / "shards")

    def _require_same(self, asked: Mapping[str, Any]) -> None:
        for key in sorted(self.manifest.keys() | asked.keys()):
            if self.manifest.get(key) != asked.get(key):
                raise ReprieveError(
                    f"label store {str(self.folder)!r} was made with {key} = {asked.get(key)!r}, this run has "
                    f"{self.manifest.get(key)!r}; labels are not mixed: name another folder"
                )

    def require_pair(self, pair: PairIdentity) -> None:
        """Refuse labels of another pair.

        Raises:
            PairError: names both.
        """
        names = (f.name for f in dataclasses.fields(PairIdentity))
        ours = PairIdentity(**{name: self.manifest.get(name) for name in names})  # type: ignore[arg-type]
        if ours.target_weights.startswith(API_WEIGHTS):  # the same model, served elsewhere: the user vouches for it
            ours = dataclasses.replace(ours, target_weights=pair.target_weights)
        ours.require_matches(pair, f"label store {str(self.folder)!r}", reads_draft=True)

    @contextlib.contextmanager
    def claim(self, problem_id: str) -> Iterator[bool]:
        """Whether this problem is ours to mine now: not done, and no other worker is at it."""
        lock = _file_lock(self.folder / "claims" / f"{_file_name(problem_id)}.lock")
        try:
            lock.acquire(timeout=0)
        except TimeoutError:  # filelock's Timeout is one
            yield False
            return
        try:
            yield problem_id not in self.done()
        finally:
            lock.release()

    def append(self, labels: ProblemLabels) -> None:
        """Write one problem; it outlives the process when this returns."""
        self._write([labels], f"one-{_file_name(labels.problem_id)}")
        self._done.add(labels.problem_id)

    def done(self) -> set[str]:
        """Problems that are in the store, whoever mined them."""
        for table in self._tables(self._read_shards, columns=["problem_id"]):
            self._done.update(table["problem_id"].to_pylist())
        return self._done

    def problems(self) -> list[ProblemLabels]:
        """All problems, each once, by problem id.

        Raises:
            ReprieveError: a shard that cannot be read.
        """
        by_problem: dict[str, ProblemLabels] = {}
        read: set[str] = set()
        for table in self._tables(read):
            try:
                by_problem.update((row["problem_id"], ProblemLabels.from_row(row)) for row in table.to_pylist())
            except (KeyError, TypeError) as error:
                raise ReprieveError(f"label store {str(self.folder)!r} holds a foreign shard: {error}") from None
        self._done |= by_problem.keys()
        self._read_shards |= read
        return [by_problem[key] for key in sorted(by_problem, key=_natural)]

    def _tables(self, seen: set[str], *, columns: list[str] | None = None) -> Iterator[Any]:
        """Every shard whose name is not in `seen`, which is added to.

        Another worker may fold shards while we read: what has gone then is in a shard that came since.

        Raises:
            ReprieveError: a shard that cannot be read.
        """
        whole, gone = not seen, set[str]()
        while new := [name for name in self._shards.names() if name not in seen | gone]:
            for name in new:
                try:
                    table = self._shards.read(name, columns)
                except FileNotFoundError:
                    gone.add(name)
                    continue
                seen.add(name)
                yield table
        if whole:  # else it was asked before, and only what is new since
            self._shards.require_all()

    def num_lost(self) -> int:
        """Problems that a worker had in hand and that are not here: it was killed, failed, or is at them still."""
        done = {f"{_file_name(problem_id)}.lock" for problem_id in self.done()}
        return sum(path.name not in done for path in (self.folder / "claims").glob("[!.]*.lock"))

    def fold(self) -> None:
        """Fold the shards of single problems into one; a kill in between leaves duplicates, which readers drop."""
        with _file_lock(self.folder / "claims" / ".fold.lock"):
            single = [name for name in self._shards.names() if name.startswith("one-")]
            if not single:
                return
            read = set(self._shards.names()) - set(single)
            before = set(read)
            rows = [ProblemLabels.from_row(row) for table in self._tables(read) for row in table.to_pylist()]
            self._write(rows, "many")
            self._shards.remove(sorted(read - before))  # also what another worker has written since

    def _write(self, labels: list[ProblemLabels], prefix: str) -> None:
        pyarrow = import_extra("pyarrow", "labels")
        self._shards.write(
            pyarrow.Table.from_pylist([problem.to_row() for problem in labels], schema=_schema()), prefix
        )


def _file_lock(path: Path) -> Any:
    return import_extra("filelock", "labels").FileLock(path)


def _schema() -> Any:
    pa = import_extra("pyarrow", "labels")
    ids = pa.list_(pa.int32())
    mismatch = pa.struct(
        [
            ("position", pa.int32()),
            ("target_id", pa.int32()),
            ("draft_id", pa.int32()),
            ("important", pa.bool_()),
            ("reason", pa.string()),
            ("continuation_ids", ids),
            ("answer", pa.string()),
            ("base_utility", pa.float64()),
            ("candidate_utility", pa.float64()),
            ("num_rollouts", pa.int32()),
            ("verdict", pa.string()),
        ]
    )
    scores = pa.list_(pa.float64())
    traced_round = pa.struct(
        [
            ("start", pa.int32()),
            ("draft_ids", ids),
            ("target_ids", ids),
            ("labels", scores),
            ("draft_utilities", scores),
            ("target_utilities", scores),
        ]
    )
    return pa.schema(
        [
            ("problem_id", pa.string()),
            ("status", pa.string()),
            ("prompt_ids", ids),
            ("target_ids", ids),
            ("response_ids", ids),
            ("target_answer", pa.string()),
            ("mismatches", pa.list_(mismatch)),
            ("seconds", pa.float64()),
            ("num_generated", pa.int64()),
            ("source", pa.string()),
            ("rounds", pa.list_(traced_round)),
            ("digest", pa.string()),
        ]
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path, "the label store's manifest")
    if not isinstance(manifest, dict) or not {"schema", "task", "target_weights", "tokenizer"} <= manifest.keys():
        raise ReprieveError(f"{str(path)!r} is not a label store's manifest: it must name schema, pair and task")
    if manifest["schema"] != SCHEMA:
        raise ReprieveError(f"{str(path)!r} must be of schema {SCHEMA}, got {manifest['schema']!r}")
    return _complete(manifest)


def _complete(manifest: dict[str, Any]) -> dict[str, Any]:
    """With what stores made before version 1.0 do not say."""
    known = str(manifest.get("task")).partition(":")[0] in _READ_ALIKE
    return {"prompt": {}, "answers": ANSWERS_VERSION if known else 1, **manifest}


def _file_name(problem_id: str) -> str:
    """Readable, short, and different for every id."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", problem_id)[:80]
    return f"{readable}-{hashlib.blake2b(problem_id.encode(), digest_size=4).hexdigest()}"


def _natural(problem_id: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", problem_id)]
