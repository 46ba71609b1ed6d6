"""Records of a run: checked when they are read, written by one process at a time."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from reprieve.bench.records import ProblemRecord, RecordFile, claim_run
from reprieve.errors import ReprieveError

GOOD = dataclasses.asdict(ProblemRecord("a", "p", True, "7", 10, 2, 8, 6, 1, 0.5, "eos", "7", {"draft": 0.1}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, {"x": 1} if not isinstance(value, dict) else 3) for name, value in GOOD.items()),
        ("num_tokens", -1), ("seconds", float("nan")), ("seconds", float("inf")), ("num_tokens", True),
        ("correct", 1), ("round_lengths", ["3"]), ("seconds_by_part", {"draft": "long"}), ("num_rounds", 1.5),
    ],
)  # fmt: skip
def test_a_field_of_another_type_or_an_impossible_number_is_named(tmp_path, name, value):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({**GOOD, name: value}) + "\n")
    with pytest.raises(ReprieveError, match=rf"problems\.jsonl, line 1 is no problem record: .*{name}"):
        RecordFile(path)


def test_a_missing_field_is_named_and_a_foreign_one_is_passed_over(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({**GOOD, "of_another_version": 1}) + "\n")
    assert RecordFile(path).records[0].num_tokens == 10
    path.write_text(json.dumps({name: value for name, value in GOOD.items() if name != "arm"}) + "\n")
    with pytest.raises(ReprieveError, match="arm is missing"):
        RecordFile(path)


def test_a_pipe_in_the_place_of_a_journal_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "problems.jsonl")
    with pytest.raises(ReprieveError, match="no plain file"):
        RecordFile(tmp_path / "problems.jsonl")


def test_a_full_disk_names_the_file_and_what_is_kept(tmp_path):
    records = claim_run(tmp_path, {"arms": ["a"]})
    records.append(ProblemRecord(**GOOD))
    records.path = type(records.path)("/dev/full")
    with pytest.raises(ReprieveError, match=r"'/dev/full' cannot be written: No space left.*the 1 answers .* kept"):
        records.append(ProblemRecord(**GOOD))


def test_a_folder_has_one_writer(tmp_path):
    held = claim_run(tmp_path, {"arms": ["a"]})
    code = (
        "import sys; from pathlib import Path; from reprieve.bench.records import claim_run\n"
        "claim_run(Path(sys.argv[1]), {'arms': ['a']})"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is in use by another run" in second.stderr
    del held
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
