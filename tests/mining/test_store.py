"""The label store: kills, readers, changed files and a second writer."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from reprieve.errors import PairError, ReprieveError
from reprieve.mining.store import LabelStore, TracedRound
from tests.kit.tiny import IDENTITY
from tests.mining.toys import MANIFEST, labels


def test_labels_round_trip_and_stay_in_order(tmp_path):
    traced = TracedRound(0, (1, 2), (1, 3), (None, 0.5), (None, 0.25), (None, 0.5))
    wanted = [labels("p-2"), dataclasses.replace(labels("p-10"), mismatches=(), rounds=(traced,)), labels("p-1", None)]
    store = LabelStore(tmp_path / "s", MANIFEST)
    for problem_labels in wanted:
        store.append(problem_labels)
    again = LabelStore(tmp_path / "s")
    assert again.problems() == [wanted[2], wanted[0], wanted[1]]
    assert again.done() == store.done() == {"p-1", "p-2", "p-10"}


def test_a_packed_store_can_be_read_and_extended(tmp_path):
    stored(tmp_path)
    path = tmp_path / "labels.jsonl"
    (tmp_path / "labels.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    LabelStore(tmp_path, MANIFEST).append(labels("p-9"))
    assert LabelStore(tmp_path).done() == {"p-0", "p-1", "p-2", "p-3", "p-9"}


@pytest.mark.parametrize(
    ("key", "value"), [("task", "gsm8k"), ("draft_weights", "x"), ("tokenizer", "y"), ("alpha", 0.5)]
)
def test_labels_with_other_settings_are_not_mixed_in(tmp_path, key, value):
    LabelStore(tmp_path, MANIFEST).append(labels())
    with pytest.raises(ReprieveError, match=f"made with {key} = .*this run has '?{value}'?; labels are not mixed"):
        LabelStore(tmp_path, {**MANIFEST, key: value})
    assert len(LabelStore(tmp_path, MANIFEST).problems()) == 1


def test_a_store_knows_its_pair(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    store.require_pair(IDENTITY)
    with pytest.raises(PairError, match="different draft_weights"):
        store.require_pair(dataclasses.replace(IDENTITY, draft_weights="d7"))
    served = LabelStore(tmp_path / "api", {**MANIFEST, "target_weights": "api:big"})
    served.require_pair(IDENTITY)


def test_folders_that_are_no_label_store_are_refused(tmp_path):
    with pytest.raises(ReprieveError, match=r"is not a label store: it has no manifest\.json"):
        LabelStore(tmp_path / "nowhere")
    LabelStore(tmp_path / "s", MANIFEST)
    (tmp_path / "s" / "manifest.json").write_text("{")
    with pytest.raises(ReprieveError, match=r"manifest.*cannot be read"):
        LabelStore(tmp_path / "s")
    (tmp_path / "s" / "manifest.json").write_text("[1]")
    with pytest.raises(ReprieveError, match="must name schema, pair and task"):
        LabelStore(tmp_path / "s")


def stored(folder, count=4):
    store = LabelStore(folder, MANIFEST)
    for number in range(count):
        store.append(labels(f"p-{number}"))
    return folder / "labels.jsonl"


def test_changed_bits_are_detected(tmp_path):
    path = stored(tmp_path)
    content = path.read_bytes()
    for number in range(0, 8 * len(content), 97):
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        path.write_bytes(changed)
        if changed.endswith(b"\n"):
            with pytest.raises(ReprieveError, match=r"labels\.jsonl.*(changed after|not a valid label|be UTF-8)"):
                LabelStore(tmp_path).problems()
    path.write_bytes(content)
    assert len(LabelStore(tmp_path).problems()) == 4


def test_a_line_cut_off_by_a_kill_is_mined_again(tmp_path):
    path = stored(tmp_path)
    content = path.read_bytes()
    for cut in (1, 2, 50):
        path.write_bytes(content[:-cut])
        reader = LabelStore(tmp_path)
        assert reader.done() == {"p-0", "p-1", "p-2"}
        assert path.read_bytes() == content[:-cut], "a reader leaves the file to its writer"
    writer = LabelStore(tmp_path, MANIFEST)
    writer.append(labels("p-9"))
    assert reader.done() == writer.done() == {"p-0", "p-1", "p-2", "p-9"}


@pytest.mark.parametrize(("name", "value"), [("position", -1), ("important", 3), ("draft_id", "7")])
def test_an_impossible_value_is_named(tmp_path, name, value):
    store = LabelStore(tmp_path, MANIFEST)
    made = labels()
    store.append(dataclasses.replace(made, mismatches=(dataclasses.replace(made.mismatches[0], **{name: value}),)))
    with pytest.raises(ReprieveError, match=rf"labels\.jsonl, line 1 is not a valid label record: {name} must be"):
        LabelStore(tmp_path).problems()


def test_stores_of_another_schema_and_folders_of_runs_are_refused(tmp_path):
    stored(tmp_path / "s")
    path = tmp_path / "s" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 7}))
    for manifest in (None, MANIFEST):
        with pytest.raises(ReprieveError, match="must be of schema 2, got 7"):
            LabelStore(tmp_path / "s", manifest)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ReprieveError, match="holds a run's answers, no labels"):
        LabelStore(tmp_path / "run", MANIFEST)


def test_a_full_disk_names_the_file_and_what_is_kept(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    store.append(labels("p-0"))
    (tmp_path / "labels.jsonl").unlink()
    (tmp_path / "labels.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        ReprieveError, match=r"labels\.jsonl' cannot be written: No space left.*the 1 labelled problems"
    ):
        store.append(labels("p-1"))


def test_a_pipe_instead_of_the_labels_is_refused_at_once(tmp_path):
    LabelStore(tmp_path, MANIFEST)
    os.mkfifo(tmp_path / "labels.jsonl")
    with pytest.raises(ReprieveError, match="not a regular file"):
        LabelStore(tmp_path).problems()


SLOW_MINER = """
import asyncio, sys
from pathlib import Path
from reprieve.mining.runner import mine_problems
from reprieve.mining.store import LabelStore
sys.path.insert(0, {tests!r})
from tests.mining.toys import MANIFEST, labels
from tests.kit.mining import problem

class Slow:
    async def mine(self, item):
        await asyncio.sleep(0.01 if item.problem_id in done else {pause})
        return labels(item.problem_id)

done = [f"p-{{n}}" for n in range(10)]
problems = [problem(f"p-{{n}}") for n in range(40)]
mine_problems(Slow(), problems, LabelStore(Path({folder!r}), MANIFEST), num_in_flight=2)
"""


def miner(folder, pause=0.01):
    """Start a process that mines ten problems quickly and waits `pause` seconds in each of the others."""
    code = SLOW_MINER.format(tests=os.getcwd(), folder=str(folder), pause=pause)
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_run_loses_only_unfinished_problems_and_locks_its_folder(tmp_path):
    first = miner(tmp_path, pause=600)
    path = tmp_path / "labels.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < 10:
        assert first.poll() is None, "the miner ended by itself"
        time.sleep(0.02)
    second = miner(tmp_path)
    assert "is in use by another run" in second.communicate(timeout=120)[1]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    kept = LabelStore(tmp_path).done()
    assert kept == {f"p-{n}" for n in range(10)}
    assert miner(tmp_path).wait(timeout=120) == 0
    assert [item.problem_id for item in LabelStore(tmp_path).problems()] == [f"p-{n}" for n in range(40)]
    assert path.read_bytes().count(b"\n") == 40, "no problem was mined twice"
