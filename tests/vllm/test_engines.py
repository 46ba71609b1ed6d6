"""`--engine vllm` and `ray`: servers are started and ended with the run, and killed ones lose nothing."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm import __version__ as VLLM_VERSION

from reprieve.backends.settings import EngineSettings
from reprieve.backends.throughput import measure_throughput
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.records import RecordFile
from reprieve.bench.settings import RunSettings, SpeedSettings
from reprieve.bench.summary import summarise
from reprieve.cli.screen import make_engine
from reprieve.errors import EngineError
from reprieve.heads.certificates import Certificate
from reprieve.heads.files import find_head
from reprieve.mining.building import build
from reprieve.mining.runner import mine_problems
from reprieve.mining.settings import AutoJudgeMining, PivotMining, TraceMining
from reprieve.mining.store import LabelStore
from reprieve.settings import PairSettings, PromptSettings
from reprieve.tasks import load_task
from reprieve.tasks.prompting import with_prompts
from tests.bench.toys import run_arms
from tests.kit.pairs import ARITHMETIC
from tests.vllm.certified import CERTIFICATE, judge_path
from tests.vllm.runner import V2

pytestmark = pytest.mark.skipif(V2, reason="these start servers; V2's interpreter is too slow for whole runs")
SMALL = "max_model_len=512,max_num_seqs=16"
PAIR = PairSettings(ARITHMETIC.name, dtype="float32")
VLLM = EngineSettings(f"vllm:{SMALL}")
SHORT = PromptSettings(max_new_tokens=48)
MARK = f"REPRIEVE_TESTS={os.getpid()}"  # in the environment of every process that these tests start


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """Mark the servers, and check that none is left."""
    monkeypatch.setenv(*MARK.split("="))
    yield
    deadline = time.monotonic() + 30
    while servers() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not servers()


def servers(*names):
    """Pids of the servers that these tests started, and of their engines; never those of others."""
    names = names or ("reprieve.backends.child", "VLLM::")
    listed = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines() if any(name in line for name in names)]
    return [int(pid) for pid, state, *_ in lines if not state.startswith("Z") and is_ours(int(pid))]


GROUPS = set()  # process groups, since engines rename themselves and lose the mark


def is_ours(pid):
    with contextlib.suppress(OSError):  # it has ended
        if MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            GROUPS.add(os.getpgid(pid))
        return os.getpgid(pid) in GROUPS
    return False


def kill_servers():
    for pid in servers():
        with contextlib.suppress(ProcessLookupError):  # gone with another of its group
            os.killpg(os.getpgid(pid), signal.SIGKILL)


def arms_of(*specs):
    return [arm for arm in make_arms(specs, [8], target=PAIR.target) if arm.rule is not None]


ARMS = ("judge:threshold=0.04", "judge:threshold=0.2")


def measured(folder, limit, *, engine=VLLM, speed=None, progress=lambda done, total: None):
    """A run, and rows of speed under load if `speed` is given."""
    arms, made = arms_of(*ARMS), make_engine(engine, PAIR)
    try:
        task = with_prompts(load_task("arithmetic"), made.tokenizer)
        config = RunConfig.of(made, arms, RunSettings(task="arithmetic", limit=limit))
        conditions = Certificate.load(find_head(judge_path()) / CERTIFICATE).conditions
        assert not [text for text in conditions.differences(config.conditions(made, arms[1])) if text]
        run = run_arms(config, arms, made, task, folder, progress=progress)
        return run, measure_throughput(made, config, task, arms, speed, folder) if speed else []
    finally:
        made.close()


def test_a_killed_server_loses_nothing_and_one_server_answers_every_arm(tmp_path):
    few = EngineSettings(f"vllm:{SMALL},parallel=2")  # otherwise all might be answered before the fourth is reported
    with pytest.raises(EngineError, match="answers are kept, run again to resume"):
        measured(tmp_path, 5, engine=few, progress=lambda done, total: kill_servers() if done == 4 else None)
    before = [(record.arm, record.problem_id) for record in RecordFile(tmp_path / "problems.jsonl").records]
    assert 4 <= len(before) < 15
    run, rows = measured(tmp_path, 5, speed=SpeedSettings(concurrency=(1, 2), turns=1, num_requests=2))
    after = [(record.arm, record.problem_id) for record in run.records]
    assert after[: len(before)] == before and len(after) == len(set(after)) == 15
    assert not any(record.error for record in run.records)
    results = summarise(run)
    config = results.config
    assert (config.engine, config.engine_version, config.runner) == ("vllm", VLLM_VERSION, "v1")
    strict, calm, wild = results.arms
    assert wild.num_rescued > calm.num_rescued > 0 == strict.num_rescued
    assert wild.tokens_per_round > strict.tokens_per_round > 2
    assert len(rows) == 6 and all(row.tokens_per_second > 0 and row.first_s[0] > 0 for row in rows)


def mined(settings, folder, *, in_flight, progress=lambda done, total: None):
    bench = build(settings)
    try:
        store = LabelStore(folder, bench.manifest)
        report = mine_problems(bench.miner, bench.problems, store, num_in_flight=in_flight, progress=progress)
    finally:
        bench.close()
    assert not report.errors
    return report


def test_mining_loses_nothing_if_its_server_is_killed(tmp_path):
    settings = AutoJudgeMining(limit=3, task="arithmetic", pair=PAIR, engine=VLLM)
    with pytest.raises(EngineError, match="labelled problems are kept, run again to resume"):
        mined(settings, tmp_path, in_flight=2, progress=lambda done, total: done and kill_servers())
    before = LabelStore(tmp_path).problems()
    report = mined(settings, tmp_path, in_flight=2)
    after = {problem.problem_id: problem for problem in LabelStore(tmp_path).problems()}
    assert 1 <= len(before) < 3 == len(after) and report.num_mined == 3 - len(before)
    assert all(after[problem.problem_id] == problem for problem in before)


@pytest.mark.parametrize(
    "settings",
    [
        TraceMining(limit=2, task="arithmetic", pair=PAIR, prompt=SHORT, num_draft_tokens=8),
        # With alpha 0 nothing is a pivot, so the walk does not depend on rollouts, which servers sample differently.
        PivotMining(limit=2, task="arithmetic", pair=PAIR, prompt=SHORT, num_rollouts=2, alpha=0.0),
    ],
    ids=lambda settings: settings.miner,
)
def test_walks_on_a_server_equal_local_walks(tmp_path, settings):
    found = []
    for name, answering in (("local", EngineSettings()), ("served", VLLM)):
        mined(dataclasses.replace(settings, engine=answering), tmp_path / name, in_flight=2)
        found.append(sorted(LabelStore(tmp_path / name).problems(), key=lambda problem: problem.problem_id))
    assert len(found[1]) == 2 and all(problem.mismatches for problem in found[1])
    for ours, theirs in zip(*found, strict=True):
        places = [[(item.position, item.draft_id, item.target_id) for item in x.mismatches] for x in (ours, theirs)]
        assert places[0] == places[1] and ours.response_ids == theirs.response_ids
        assert settings.miner == "pivot" or ours.rounds == theirs.rounds


def test_killing_a_command_ends_its_server(tmp_path):
    arguments = ["mine", "autojudge", "--limit", "9", "--engine", VLLM.engine, "--dtype", "float32", "--out"]
    command = [sys.executable, "-m", "reprieve.cli.main", *arguments, str(tmp_path / "m")]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 240
    while not servers() or not servers("VLLM::EngineCore"):  # its own process, which must end too
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.kill()
    process.wait()


def test_replicas_of_a_ray_cluster_share_the_work(tmp_path):
    ray = pytest.importorskip("ray")
    try:
        run, _ = measured(tmp_path, 3, engine=EngineSettings(f"ray:replicas=2,{SMALL}"))
    finally:
        ray.shutdown()
    assert len(run.records) == 9 and not any(record.error for record in run.records)
