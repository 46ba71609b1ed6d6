"""`--engine vllm` and `ray` as a person types them: servers of their own, ended with the command."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from reprieve.evaluation.records import RecordFile
from reprieve.labelling.store import LabelStore
from tests.vllm.runner import V2

pytestmark = pytest.mark.skipif(V2, reason="these start servers; V2's interpreter is too slow for whole runs")
SMALL = "max_model_len=512,max_num_seqs=16"
MODE = {"env": {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}}


def command(*arguments, engine=f"vllm:{SMALL}"):
    return [sys.executable, "-m", "reprieve.cli.main", *arguments, "--engine", engine, "--dtype", "float32"]


def run(*arguments, **more):
    made = subprocess.run(command(*arguments, **more), capture_output=True, text=True, check=False, **MODE)
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout


def servers():
    """Processes of servers that were started by these tests."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "reprieve.servers.child" in line]


BENCH = ("bench", "--arm", "judge:threshold=0.04", "--arm", "judge:threshold=0.2", "--num-draft-tokens", "8")


def test_one_server_answers_every_threshold_and_the_strict_arm(tmp_path):
    run(*BENCH, "--limit", "8", "--concurrency", "1,4", "--turns", "1", "--out", str(tmp_path / "b"))
    document = json.loads((tmp_path / "b" / "results.json").read_text())
    arms = {arm["rule"] + str(arm["params"].get("threshold", "")): arm for arm in document["arms"]}
    assert (document["engine"], document["engine_version"], document["runner"]) == ("vllm", "0.32.0", "v1")
    assert {"target_only", "draft_only", "lossless"} < arms.keys()
    assert arms["judge0.2"]["num_rescued"] > arms["judge0.04"]["num_rescued"] > 0 == arms["lossless"]["num_rescued"]
    assert arms["judge0.2"]["tokens_per_round"] > arms["lossless"]["tokens_per_round"] > 2
    rows = {(row["arm"], row["concurrency"]): row for row in document["throughput"]}
    assert len(rows) == 2 * len(document["arms"])
    assert all(row["tokens_per_second"] > 0 and row["first_s"][0] > 0 for row in rows.values())
    assert not servers()


def interrupted(arguments, ready, stop):
    """Start a command and stop its server once `ready` says so; returns what it said."""
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True, **MODE)
    deadline = time.monotonic() + 240
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()[-3000:]
        time.sleep(0.1)
    stop(process)
    said = process.communicate(timeout=240)[1]
    assert process.returncode != 0
    return said


def kill_server(process):
    for pid in servers():
        os.killpg(pid, signal.SIGKILL)


def test_a_killed_server_in_a_sweep_loses_nothing(tmp_path):
    sweep = ("sweep", "--rule", "judge", "--thresholds", "0.04,0.2", "--num-draft-tokens", "8", "--limit", "30")
    out, records = tmp_path / "s", tmp_path / "s" / "problems.jsonl"
    said = interrupted(
        [*sweep, "--out", str(out)], lambda: records.exists() and len(records.read_text().splitlines()) > 5, kill_server
    )
    assert "answers are kept, run again to go on" in said
    before = [(record.arm, record.problem_id) for record in RecordFile(records).records]
    run(*sweep, "--out", str(out))
    after = [(record.arm, record.problem_id) for record in RecordFile(records).records]
    assert after[: len(before)] == before and len(after) == len(set(after)) == 5 * 30


def test_a_killed_server_in_a_mine_loses_nothing(tmp_path):
    mine = ("mine", "autojudge", "--limit", "6", "--in-flight", "2", "--out", str(tmp_path))
    shards = lambda: any(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))  # noqa: E731
    said = interrupted(mine, shards, kill_server)
    assert "labelled problems are kept, run again to go on" in said
    before = LabelStore(tmp_path).problems()
    run(*mine)
    after = {problem.problem_id: problem for problem in LabelStore(tmp_path).problems()}
    assert len(after) == 6 and all(after[problem.problem_id] == problem for problem in before)


def test_a_command_that_is_killed_takes_its_server_along(tmp_path):
    bench = [*BENCH, "--limit", "200", "--out", str(tmp_path / "b")]
    records = tmp_path / "b" / "problems.jsonl"
    interrupted(bench, records.exists, lambda process: process.kill())
    deadline = time.monotonic() + 30
    while servers() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not servers()


def test_replicas_of_a_ray_cluster_share_the_work(tmp_path):
    pytest.importorskip("ray")
    run(*BENCH, "--limit", "6", "--out", str(tmp_path / "b"), engine=f"ray:replicas=2,{SMALL}")
    document = json.loads((tmp_path / "b" / "results.json").read_text())
    assert document["engine"] == "vllm" and len(document["arms"]) == 5
    assert all(arm["num_failed"] == 0 for arm in document["arms"])
