"""The label store: a folder with `manifest.json` and the append-only `labels.jsonl`, and labels made by hand.

A finished problem is on disk when `append` returns, so a run killed at any moment loses only the problems in flight.
One process writes; any number may read. Each line has a checksum. An archived store can hold `labels.jsonl.gz` instead.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.errors import ReprieveError
from reprieve.files import append_line, first_difference, open_folder, read_json, read_lines, record_from, replace_file
from reprieve.identity import PairIdentity, digest
from reprieve.tasks.answers import ANSWERS_VERSION
from reprieve.tasks.table import read_jsonl

if TYPE_CHECKING:
    from filelock import FileLock

MINED = "mined"
NO_ANSWER = "no_answer"  # the target's own response has no answer to compare with
SCHEMA = 2
API_WEIGHTS = "api:"  # prefix of the target's fingerprint if its weights are unknown
_MANIFEST, _LABELS, _CHECKSUM = "manifest.json", "labels.jsonl", "checksum"


@dataclass(frozen=True)
class Mismatch:
    """Drafted token that the target would not have chosen, and its label.

    For every miner, its context is the prompt and the first `position` tokens of the problem's final response, because
    miners decide the tokens of that response in order.
    """

    position: int  # in the response
    target_id: int
    draft_id: int
    important: bool | None  # AutoJudge's "important", PAD's "pivot"; None if undecided
    reason: str = ""  # set if `important` does not follow from answers or utilities
    continuation_ids: tuple[int, ...] = ()  # continuation after the draft token
    answer: str | None = None  # answer of that response
    base_utility: float | None = None  # PAD: share of correct rollouts from the text before the token
    candidate_utility: float | None = None  # PAD: the same with the token
    num_rollouts: int = 0  # PAD: on each side
    verdict: str = ""  # of a language model, if used


@dataclass(frozen=True)
class TracedRound:
    """One round of plain speculative decoding, with the values of the mismatches in its block (CoSpec, appendix C.1).

    All lists have one entry per drafted token; those of labels and utilities are empty before labelling, and None for
    matches and unevaluated mismatches.
    """

    start: int  # tokens of the response before it
    draft_ids: tuple[int, ...]
    target_ids: tuple[int, ...]  # the target's own token at each position
    labels: tuple[float | None, ...] = ()  # soft label for accepting the draft's token, 0 to 1
    draft_utilities: tuple[float | None, ...] = ()  # of continuing with the draft's token
    target_utilities: tuple[float | None, ...] = ()

    @property
    def mismatched_nodes(self) -> list[int]:
        """Drafted tokens that differ from the target's, as indices into the lists."""
        pairs = zip(self.draft_ids, self.target_ids, strict=True)
        return [node for node, (draft_id, target_id) in enumerate(pairs) if draft_id != target_id]


@dataclass(frozen=True)
class ProblemLabels:
    """All mismatches of one problem, in order, and the final response."""

    problem_id: str
    status: str  # "mined" or "no_answer"
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]  # the target's own response; () if the miner generates none
    response_ids: tuple[int, ...]  # final; search and pivot miners keep unimportant draft tokens
    target_answer: str | None
    mismatches: tuple[Mismatch, ...]
    seconds: float = 0.0
    num_generated: int = 0  # tokens the target generated for it
    source: str = ""  # the miner's name
    rounds: tuple[TracedRound, ...] = ()  # of the response, if the miner records them
    digest: str = ""  # of the problem's question

    def labelled(self) -> list[Mismatch]:
        """Return the mismatches that have a label."""
        return [mismatch for mismatch in self.mismatches if mismatch.important is not None]


class LabelStore:
    """A folder of labels that were all made in the same way.

    Args:
        folder: of the store; created for a writer.
        manifest: pair, tokenizer, task, miner and its settings. An existing store must have the same manifest. None
            opens an existing store for reading.

    Raises:
        ReprieveError: no store in the folder, a store with another manifest (the message names the first difference),
            or one that another process is writing.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._lock: FileLock | None = None
        path = folder / _MANIFEST
        if manifest is None:
            if not path.exists():
                raise ReprieveError(f"{str(folder)!r} is not a label store: it has no {_MANIFEST}")
            self.manifest = _read_manifest(path)
            if (version := self.manifest["answers"]) != ANSWERS_VERSION:
                warnings.warn(
                    f"label store {str(folder)!r} was made with version {version} of answer extraction, this is "
                    f"version {ANSWERS_VERSION}: answers may have been extracted differently; mine it again",
                    stacklevel=2,
                )
            return
        self.manifest = {"schema": SCHEMA, "answers": ANSWERS_VERSION, "prompt": {}, **json.loads(json.dumps(manifest))}
        if (folder / "run.json").exists():
            raise ReprieveError(f"{str(folder)!r} holds a run's answers, no labels: name another folder")
        self._lock = open_folder(folder)
        if path.exists():
            existing = _read_manifest(path)
            if (key := first_difference(self.manifest, existing)) is not None:
                raise ReprieveError(
                    f"label store {str(self.folder)!r} was made with {key} = {existing.get(key)!r}, this run has "
                    f"{self.manifest.get(key)!r}; labels are not mixed: name another folder"
                )
        else:
            replace_file(path, json.dumps(self.manifest, indent=2) + "\n")
        self._done = {labels.problem_id for labels in self._read()}

    def require_pair(self, pair: PairIdentity) -> None:
        """Refuse labels of another pair.

        Raises:
            PairError: names both.
        """
        names = (f.name for f in dataclasses.fields(PairIdentity))
        labelled = PairIdentity(**{name: self.manifest.get(name) for name in names})  # type: ignore[arg-type]
        if labelled.target_weights.startswith(API_WEIGHTS):  # an API hides the weights: trust the user
            labelled = dataclasses.replace(labelled, target_weights=pair.target_weights)
        labelled.require_matches(pair, f"label store {str(self.folder)!r}", reads_draft=True)

    def append(self, labels: ProblemLabels) -> None:
        """Write one problem; it is on disk when this returns.

        Raises:
            ReprieveError: the file cannot be written; names it and what is kept.
        """
        values = dataclasses.asdict(labels)
        kept = f"the {len(self._done)} labelled problems before it"
        append_line(self.folder / _LABELS, {**values, _CHECKSUM: _checksum(values)}, kept)
        self._done.add(labels.problem_id)

    def done(self) -> set[str]:
        """Return the ids of the problems in the store."""
        return self._done if self._lock is not None else {labels.problem_id for labels in self._read()}

    def problems(self) -> list[ProblemLabels]:
        """Return all problems without duplicates, sorted by problem id.

        Raises:
            ReprieveError: a line that cannot be read, or was changed; names file and line.
        """
        by_problem = {labels.problem_id: labels for labels in self._read()}
        return [by_problem[key] for key in sorted(by_problem, key=_natural)]

    def _read(self) -> Iterator[ProblemLabels]:
        for path in (self.folder / f"{_LABELS}.gz", self.folder / _LABELS):
            for where, values in read_lines(path, "label record", repair=self._lock is not None):
                if values.pop(_CHECKSUM, None) != _checksum(values):
                    raise ReprieveError(f"{where}: it was changed after it was written")
                try:
                    yield record_from(ProblemLabels, values)
                except ValueError as error:
                    raise ReprieveError(f"{where}: {error}") from None


def _checksum(values: Mapping[str, Any]) -> str:
    return digest(json.dumps(values, ensure_ascii=False).encode())


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path, "the label store's manifest")
    needed = {"schema", "task", "target_weights", "tokenizer", "answers"}
    if not isinstance(manifest, dict) or not needed <= manifest.keys():
        raise ReprieveError(f"{str(path)!r} is not a label store's manifest: it must name schema, pair and task")
    if manifest["schema"] != SCHEMA:
        raise ReprieveError(f"{str(path)!r} must be of schema {SCHEMA}, got {manifest['schema']!r}")
    return manifest


def _natural(problem_id: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", problem_id)]


def read_annotations(path: Path, tokenizer: Any) -> list[ProblemLabels]:
    """Read annotated responses from a JSONL file.

    Each line has `prompt`, `response`, and `wrong`: a list of [start, end) character spans of the response. Tokens that
    touch a span are important, all others are not. The head learns from the states that encode the token itself.

    Args:
        tokenizer: a fast tokenizer, which maps tokens to character offsets.

    Raises:
        ReprieveError: a missing field, or a span outside the response; names file and line.
    """
    problems = [_problem(row, f"{path}, line {number}", number, tokenizer) for number, row in read_jsonl(path)]
    if not problems:
        raise ReprieveError(f"{str(path)!r} holds no annotations")
    ids = [problem.problem_id for problem in problems]
    if twice := next((name for name in ids if ids.count(name) > 1), None):
        raise ReprieveError(f"{path}: id must be unique, got {twice!r} twice")
    return problems


def _problem(row: dict[str, Any], where: str, number: int, tokenizer: Any) -> ProblemLabels:
    if missing := {"prompt", "response", "wrong"} - row.keys():
        raise ReprieveError(f"{where}: must have prompt, response and wrong; {', '.join(sorted(missing))} is missing")
    prompt, response = str(row["prompt"]), str(row["response"])
    if not isinstance(row["wrong"], list):
        raise ReprieveError(f"{where}: wrong must be a list of [start, end), got {row['wrong']!r}")
    for span in row["wrong"]:
        numbers = isinstance(span, list) and len(span) == 2 and all(isinstance(end, int) for end in span)
        if not numbers or not 0 <= span[0] < span[1] <= len(response):
            raise ReprieveError(f"{where}: a span must be [start, end) in [0, {len(response)}], got {span!r}")
    prompt_ids = list(tokenizer.encode(prompt))
    encoded = tokenizer(response, add_special_tokens=False, return_offsets_mapping=True)
    mismatches = []
    for position, (token_id, (start, end)) in enumerate(
        zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ):
        wrong = any(start < span[1] and span[0] < end for span in row["wrong"])
        mismatches.append(Mismatch(position, token_id, token_id, wrong, reason="annotated"))
    return ProblemLabels(
        problem_id=str(row.get("id", f"annotated-{number}")),
        status=MINED,
        prompt_ids=tuple(prompt_ids),
        target_ids=tuple(encoded["input_ids"]),
        response_ids=tuple(encoded["input_ids"]),
        target_answer=None,
        mismatches=tuple(mismatches),
        source="annotations",
    )
