"""The label store: what survives kills, readers and two workers."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reprieve.errors import PairError, ReprieveError
from reprieve.mining.runner import mine_problems
from reprieve.mining.store import LabelStore
from tests.kit.mining import problem
from tests.kit.tiny import IDENTITY
from tests.mining.toys import MANIFEST, labels


def test_labels_round_trip_and_stay_in_order(tmp_path):
    store = LabelStore(tmp_path / "s", MANIFEST)
    wanted = [labels("p-2"), dataclasses.replace(labels("p-10"), mismatches=()), labels("p-1", None)]
    for problem_labels in wanted:
        store.append(problem_labels)
    again = LabelStore(tmp_path / "s")
    assert again.problems() == [wanted[2], wanted[0], wanted[1]]
    store.fold()
    assert [path.name[:4] for path in (tmp_path / "s" / "shards").iterdir()] == ["many"]
    assert again.problems() == [wanted[2], wanted[0], wanted[1]]
    assert again.done() == {"p-1", "p-2", "p-10"}


@pytest.mark.parametrize(
    ("key", "value"), [("task", "gsm8k"), ("draft_weights", "x"), ("tokenizer", "y"), ("alpha", 0.5)]
)
def test_labels_of_something_else_are_not_mixed_in(tmp_path, key, value):
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


def test_what_is_no_store_or_no_shard_is_named(tmp_path):
    with pytest.raises(ReprieveError, match=r"is not a label store: it has no manifest\.json"):
        LabelStore(tmp_path / "nowhere")
    store = LabelStore(tmp_path / "s", MANIFEST)
    (tmp_path / "s" / "shards" / "one-x.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ReprieveError, match=r"one-x\.parquet' cannot be read"):
        store.problems()
    (tmp_path / "s" / "manifest.json").write_text("{")
    with pytest.raises(ReprieveError, match=r"manifest.*cannot be read"):
        LabelStore(tmp_path / "s")
    (tmp_path / "s" / "manifest.json").write_text("[1]")
    with pytest.raises(ReprieveError, match="must name schema, pair and task"):
        LabelStore(tmp_path / "s")


def test_a_reader_sees_every_problem_while_another_worker_folds(tmp_path, monkeypatch):
    writer, reader = LabelStore(tmp_path, MANIFEST), LabelStore(tmp_path)
    for number in range(5):
        writer.append(labels(f"p-{number}"))
    listed = reader._shards.names

    def list_then_fold():
        shards = listed()
        writer.fold()
        return shards

    monkeypatch.setattr(reader._shards, "names", list_then_fold)
    assert len(reader.problems()) == 5
    assert reader.done() == {f"p-{number}" for number in range(5)}


def test_a_last_single_problem_is_folded_too(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    for number in range(3):
        store.append(labels(f"p-{number}"))
    store.fold()
    store.append(labels("p-3"))  # by the worker that was at it while the other one folded
    store.fold()
    assert not list((tmp_path / "shards").glob("one-*"))
    assert len(LabelStore(tmp_path).problems()) == 4


def test_ids_that_look_alike_in_file_names_are_kept_apart(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    with store.claim("a b") as first, store.claim("a_b") as second, store.claim("x" * 300) as long:
        assert (first, second, long) == (True, True, True)
    store.append(labels("x" * 300))
    assert store.done() == {"x" * 300}


def test_a_problem_is_claimed_by_one_worker_and_freed_by_its_death(tmp_path):
    first, second = LabelStore(tmp_path, MANIFEST), LabelStore(tmp_path, MANIFEST)
    with first.claim("p/1") as ours, second.claim("p/1") as theirs:
        assert (ours, theirs) == (True, False)
    with second.claim("p/1") as theirs:
        assert theirs
        second.append(labels("p/1"))
    with first.claim("p/1") as ours:
        assert not ours, "it is done, though this store object did not do it"


SLOW_WORKER = """
import asyncio, sys, time
from pathlib import Path
from reprieve.mining.runner import mine_problems
from reprieve.mining.store import LabelStore
sys.path.insert(0, {tests!r})
from tests.mining.toys import MANIFEST, labels
from tests.kit.mining import problem

class Slow:
    async def mine(self, item):
        await asyncio.sleep(0.03)
        return labels(item.problem_id)

problems = [problem(f"p-{{n}}") for n in range({size})]
mine_problems(Slow(), problems, LabelStore(Path({folder!r}), MANIFEST), num_in_flight=2)
"""


def worker(folder, size=60):
    code = SLOW_WORKER.format(tests=str(os.getcwd()), folder=str(folder), size=size)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_workers_lose_only_what_is_in_hand_and_two_share_the_rest(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    first = worker(tmp_path)
    while len(store.done()) < 5:
        assert first.poll() is None, "the worker ended by itself"
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = set(store.done())
    assert 5 <= len(kept) < 60
    both = [worker(tmp_path), worker(tmp_path)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    shards = {path.name for path in (tmp_path / "shards").glob("*.parquet")}
    assert not [name for name in shards if name.startswith("one-")], "the last worker to end folds"
    found = LabelStore(tmp_path).problems()
    assert [item.problem_id for item in found] == [f"p-{n}" for n in range(60)]
    import pyarrow.parquet as parquet

    rows = sum(parquet.read_table(tmp_path / "shards" / name).num_rows for name in shards)
    assert rows == 60, "no problem was mined twice"


def test_what_a_dead_worker_had_in_hand_is_mined_after_all(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    holder = LabelStore(tmp_path, MANIFEST).claim("p-0")

    class Dying:
        async def mine(self, item):
            if item.problem_id == "p-2":
                holder.__exit__(None, None, None)  # the other worker dies while we are at the last problem
            return labels(item.problem_id)

    assert holder.__enter__()
    report = mine_problems(Dying(), [problem(f"p-{n}") for n in range(3)], store, num_in_flight=1)
    assert (report.num_mined, report.num_skipped) == (3, 0)


A, B, C, AB, BC, SPACE = range(1, 7)


class TwoWorkers(RuleBasedStateMachine):
    """Two workers on one folder, in any order of what they may do; one may be killed and start again."""

    @initialize()
    def start(self):
        self.folder = Path(tempfile.mkdtemp())
        self.workers = [LabelStore(self.folder, MANIFEST) for _ in range(2)]
        self.wanted = {}

    def teardown(self):
        shutil.rmtree(self.folder)

    @rule(worker=st.integers(0, 1), number=st.integers(0, 5), important=st.sampled_from([True, False, None]))
    def mine(self, worker, number, important):
        store, made = self.workers[worker], labels(f"p-{number}", important)
        with store.claim(made.problem_id) as ours:
            assert ours == (made.problem_id not in self.wanted)
            if ours:
                store.append(made)
                self.wanted[made.problem_id] = made

    @rule(worker=st.integers(0, 1))
    def fold(self, worker):
        self.workers[worker].fold()

    @rule(worker=st.integers(0, 1))
    def restart(self, worker):
        self.workers[worker] = LabelStore(self.folder, MANIFEST)

    @invariant()
    def everybody_sees_every_problem_once(self):
        for store in (*self.workers, LabelStore(self.folder)):
            assert store.done() == set(self.wanted)
            assert store.problems() == [self.wanted[key] for key in sorted(self.wanted)]


TestTwoWorkers = TwoWorkers.TestCase
TestTwoWorkers.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


def stored(folder, count=4, *, fold=False):
    store = LabelStore(folder, MANIFEST)
    for number in range(count):
        store.append(labels(f"p-{number}"))
    if fold:
        store.fold()
    return sorted((folder / "shards").glob("*.parquet"))


@pytest.mark.parametrize("fold", [False, True])
def test_every_flipped_bit_is_seen(tmp_path, fold):
    shard = stored(tmp_path, fold=fold)[0]
    content = shard.read_bytes()
    for number in range(0, 8 * len(content), max(1, len(content) // 10)):
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        shard.write_bytes(changed)
        with pytest.raises(ReprieveError, match="was changed after it was written"):
            LabelStore(tmp_path).problems()
    for cut in (b"", content[:-1], content[: len(content) // 2], content + b"x"):
        shard.write_bytes(cut)
        with pytest.raises(ReprieveError, match="was changed after it was written"):
            LabelStore(tmp_path).done()
    shard.write_bytes(content)
    assert len(LabelStore(tmp_path).problems()) == 4


@pytest.mark.parametrize("fold", [False, True])
def test_a_deleted_shard_is_missed(tmp_path, fold):
    shard = stored(tmp_path, fold=fold)[-1]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ReprieveError, match=f"has lost 1 of its shards, such as {shard.name}"):
        LabelStore(tmp_path).problems()
    shard.write_bytes(content)
    assert len(LabelStore(tmp_path).problems()) == 4


def test_a_shard_renamed_is_another(tmp_path):
    one, two, *_ = stored(tmp_path)
    content = one.read_bytes()
    two.write_bytes(content)
    with pytest.raises(ReprieveError, match="was changed"):
        LabelStore(tmp_path).problems()


def test_a_journal_cut_off_by_a_kill_loses_nothing(tmp_path):
    stored(tmp_path)
    journal = tmp_path / "journal.jsonl"
    content = journal.read_bytes()
    for cut in range(len(content) - 60, len(content)):
        journal.write_bytes(content[:cut])
        store = LabelStore(tmp_path, MANIFEST)
        assert len(store.done()) == 4
    store.append(labels("p-9"))
    store.fold()
    assert len(LabelStore(tmp_path).problems()) == 5


def test_stores_of_another_schema_and_folders_of_runs_are_refused(tmp_path):
    stored(tmp_path / "s")
    path = tmp_path / "s" / "manifest.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 7'))
    for manifest in (None, MANIFEST):
        with pytest.raises(ReprieveError, match="must be of schema 1, got 7"):
            LabelStore(tmp_path / "s", manifest)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ReprieveError, match="holds a run's answers, no labels"):
        LabelStore(tmp_path / "run", MANIFEST)


def test_what_killed_workers_left_is_swept_and_told(tmp_path, capsys, monkeypatch):
    from reprieve.cli.main import main

    process = subprocess.Popen(["true"])
    process.wait()
    stored(tmp_path)
    host = socket.gethostname()
    dead, alive = (tmp_path / "shards" / f".x.{host}.{number}.tmp" for number in (process.pid, os.getpid()))
    for path in (dead, alive):
        path.write_bytes(b"half")
    with LabelStore(tmp_path, MANIFEST).claim("p-77") as ours:
        assert ours
    assert not dead.exists() and alive.exists()
    assert LabelStore(tmp_path).num_lost() == 1
    monkeypatch.setattr("reprieve.cli.labels._open", lambda folder: (LabelStore(folder), [], None))
    assert main(["labels", "stats", str(tmp_path), "--top", "0"]) == 0
    assert "1 more were begun and are not here" in capsys.readouterr().out


def test_a_store_made_before_has_neither_digests_nor_a_journal(tmp_path):
    for number, shard in enumerate(stored(tmp_path)):
        shard.rename(shard.with_name(f"one-p-{number}-0123abcd.parquet"))
    (tmp_path / "journal.jsonl").unlink()
    assert len(LabelStore(tmp_path).problems()) == 4


def test_links_that_lead_nowhere_are_not_waited_for(tmp_path):
    stored(tmp_path)
    (tmp_path / "shards" / "x.parquet").symlink_to("/nonexistent")
    assert len(LabelStore(tmp_path).done()) == 4
    with (tmp_path / "journal.jsonl").open("a") as journal:
        journal.write('{"add": 5}\n[1]\n{"add": ["x.parquet"]}\n')
    with pytest.raises(ReprieveError, match=r"has lost 1 of its shards, such as x\.parquet"):
        LabelStore(tmp_path).done()
