"""Records of a run: checked when they are read, written by one process at a time."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys

import pytest

from reprieve.bench.records import ProblemRecord, RecordFile, claim_run, read_answers
from reprieve.errors import ReprieveError
from reprieve.files import replace_file
from tests.kit.records import a_record

GOOD = dataclasses.asdict(a_record())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, {"x": 1} if not isinstance(value, dict) else 3) for name, value in GOOD.items()),
        ("num_tokens", 10**400), ("seconds", 1e300),
        ("num_tokens", -1), ("seconds", float("nan")), ("seconds", float("inf")), ("num_tokens", True),
        ("correct", 1), ("round_lengths", ["3"]), ("seconds_by_part", {"draft": "long"}), ("num_rounds", 1.5),
    ],
)  # fmt: skip
def test_fields_with_a_wrong_type_or_value_are_named(tmp_path, name, value):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({**GOOD, name: value}) + "\n")
    with pytest.raises(ReprieveError, match=rf"problems\.jsonl, line 1 is not a valid problem record: .*{name}"):
        RecordFile(path)


def test_a_missing_field_is_named_and_an_unknown_one_is_ignored(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({**GOOD, "of_another_version": 1}) + "\n")
    assert RecordFile(path).records[0].num_tokens == 10
    path.write_text(json.dumps({name: value for name, value in GOOD.items() if name != "arm"}) + "\n")
    with pytest.raises(ReprieveError, match="arm is missing"):
        RecordFile(path)


def test_an_archived_run_can_be_compressed(tmp_path):
    assert read_answers(tmp_path) == []
    (tmp_path / "problems.jsonl.gz").write_bytes(gzip.compress((json.dumps(GOOD) + "\n").encode()))
    assert read_answers(tmp_path) == [a_record()]
    with pytest.raises(ReprieveError, match="holds an archived run"):
        claim_run(tmp_path, {"limit": 1})


def test_a_pipe_instead_of_a_journal_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "problems.jsonl")
    with pytest.raises(ReprieveError, match="not a regular file"):
        RecordFile(tmp_path / "problems.jsonl")


@pytest.mark.parametrize("name", ["problems.jsonl", "run.json"])
def test_a_pipe_in_a_runs_folder_is_refused_at_once(tmp_path, name):
    if name == "run.json":
        (tmp_path / "problems.jsonl").write_text(json.dumps(GOOD) + "\n")
    os.mkfifo(tmp_path / name)
    with pytest.raises(ReprieveError, match="not a regular file"):
        claim_run(tmp_path, {"arms": ["a"]})


@pytest.fixture
def small_disk(tmp_path):
    """A 64 KB file system; mounting one needs root."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_keeps_every_complete_answer(small_disk):
    records = claim_run(small_disk, {"arms": ["a"]})

    def fill():
        for _ in range(100):
            records.append(ProblemRecord(**{**GOOD, "text": "x" * 5000}))

    message = r"problems.jsonl' cannot be written: No space left.*the \d+ answers"
    with pytest.raises(ReprieveError, match=message) as error:
        fill()
    kept = len(records.records)
    assert f"the {kept} answers before it are kept" in str(error.value) and kept > 3
    whole = (small_disk / "problems.jsonl").read_text().rpartition("\n")[0]
    assert len(whole.splitlines()) == kept, "what is on the disk"
    with pytest.raises(ReprieveError, match=r"cannot be written: No space left"):
        replace_file(small_disk / "results.json", "x" * 100_000)
    assert not (small_disk / "results.json").exists()


def test_a_full_disk_names_the_file_and_what_is_kept(tmp_path):
    records = claim_run(tmp_path, {"arms": ["a"]})
    records.append(ProblemRecord(**GOOD))
    records.path = type(records.path)("/dev/full")
    with pytest.raises(ReprieveError, match=r"'/dev/full' cannot be written: No space left.*the 1 answers .* kept"):
        records.append(ProblemRecord(**GOOD))


@pytest.mark.slow
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


def test_a_damaged_configuration_is_refused_by_name(tmp_path):
    (tmp_path / "problems.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "run.json").write_text(json.dumps({"arms": 5}))
    with pytest.raises(ReprieveError, match="must hold arms as a list, got 5"):
        claim_run(tmp_path, {"arms": ["a"]}, extendable=("arms",))
    (tmp_path / "run.json").write_text(json.dumps({"arms": [["b"]], "seed": 1}))
    with pytest.raises(ReprieveError, match="with seed = 1 instead of None"):
        claim_run(tmp_path, {"arms": ["a"]}, extendable=("arms",))
