"""Runs on server engines: the local engine's answers, none of them lost or requested twice."""

import dataclasses
import json

import pytest

from reprieve.backends.local import LocalEngine
from reprieve.backends.settings import EngineSettings
from reprieve.backends.throughput import FILE, measure_throughput
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.records import RecordFile
from reprieve.bench.report import write_report
from reprieve.bench.run import Run
from reprieve.bench.settings import RunSettings, SpeedSettings
from reprieve.bench.summary import summarise
from reprieve.cli.main import main
from reprieve.cli.screen import make_engine
from reprieve.errors import EngineError, SpecError
from reprieve.settings import PairSettings, SamplingSettings
from tests.bench.toys import run_arms
from tests.kit.pairs import ARITHMETIC, SMALL
from tests.kit.servers import PairServer

RULES = ("judge:path=reprieve/arithmetic-judge,threshold=0.02", "top_k:k=2")
ARMS = ("judge:threshold=0.04", "judge:threshold=0.2", "top_k:k=4")
SETTINGS = RunSettings(task="arithmetic", limit=5)


def engine_of(*servers, **more):
    urls = ";".join(server.url for server in servers)
    given = "".join(f",{name}={value}" for name, value in more.items())
    return make_engine(EngineSettings(f'openai:url="{urls}"{given}'), PairSettings(ARITHMETIC.name, dtype="float32"))


def arms_of(*specs, k=8):
    return [arm for arm in make_arms(specs, [k], target="reprieve/arithmetic-pair") if arm.rule is not None]


@pytest.mark.slow
def test_a_server_gives_the_local_engines_answers(bundled_pair, task, tmp_path):
    arms, settings = arms_of(*ARMS), dataclasses.replace(SETTINGS, limit=2)
    local = LocalEngine(bundled_pair)
    ours = run_arms(RunConfig.of(local, arms, settings), arms, local, task, tmp_path / "local")
    with PairServer(bundled_pair, RULES) as server:
        engine = engine_of(server)
        config = RunConfig.of(engine, arms, settings)
        theirs = run_arms(config, arms, engine, task, tmp_path / "served")
    assert (config.engine, config.engine_version, config.runner) == ("vllm", "0.32.0", "v1")

    def told(run):
        names = ("arm", "problem_id", "answer", "correct", "text", "num_tokens", "num_rounds", "num_rescued")
        return sorted(tuple(getattr(record, name) for name in names) for record in run.records)

    assert told(ours) == told(theirs)
    results = summarise(theirs)
    assert results.config.engine == "vllm" and all(arm.tokens_per_second is None for arm in results.arms)
    assert results.arms[1].num_rescued > 0 and results.arms[1].tokens_per_round > 5
    asked = [request.get("vllm_xargs") for request in server.requests]
    assert {"reprieve_rule": "judge", "reprieve_threshold": 0.2} in asked and {"reprieve_rule": "off"} in asked


@pytest.mark.slow
def test_a_run_resumes_after_its_server_dies_without_repeating_requests(bundled_pair, short, tmp_path):
    arms = arms_of(*ARMS)
    with PairServer(bundled_pair, RULES, dies_after=7) as server:
        engine = engine_of(server, parallel=3)
        with pytest.raises(EngineError, match=r"does not answer .*7 answers are kept, run again to resume"):
            Run(RunConfig.of(engine, arms, SETTINGS), arms, engine, short, tmp_path).measure()
    before = [(record.arm, record.problem_id) for record in RecordFile(tmp_path / "problems.jsonl").records]
    assert len(before) == len(server.requests) == 7
    with PairServer(bundled_pair, RULES) as server:
        engine = engine_of(server)
        run = Run(RunConfig.of(engine, arms, SETTINGS), arms, engine, short, tmp_path)
        assert run.measure()
    after = [(record.arm, record.problem_id) for record in run.records]
    assert after[:7] == before and len(after) == len(set(after)) == 20 and len(server.requests) == 13


def test_when_one_server_dies_the_others_take_over_its_share(bundled_pair, short, tmp_path):
    arms = arms_of("top_k:k=4")
    with PairServer(bundled_pair, RULES, dies_after=2) as weak, PairServer(bundled_pair, RULES) as strong:
        engine = engine_of(weak, strong, parallel=4)
        run = Run(RunConfig.of(engine, arms, SETTINGS), arms, engine, short, tmp_path)
        assert run.measure()
    assert len(weak.requests) == 2 and len(strong.requests) == 8
    assert not any(record.error for record in run.records)


@pytest.mark.parametrize(
    ("arms", "rules", "said"),
    [
        (arms_of("top_k:k=4", k=4), RULES, "the servers draft K = 8 tokens, not 4"),
        (arms_of("margin:delta=2"), RULES, "the servers offer judge"),
        (arms_of("top_k:k=4"), (), "without the plugin"),
        (make_arms(["direct:top_k:k=2"], [8])[3:], RULES, "use --engine local"),
        (make_arms([], [8])[:1], RULES, "do not hold the target alone"),
    ],
)
def test_arms_that_a_server_cannot_run_are_refused_by_name(bundled_pair, task, tmp_path, arms, rules, said):
    with PairServer(bundled_pair, rules) as server:
        engine = engine_of(server)
        with pytest.raises(SpecError, match=rf"arm .* cannot be measured here: .*{said}"):
            Run(RunConfig.of(engine, arms, SETTINGS), arms, engine, task, tmp_path)


def test_a_draft_temperature_is_refused_on_servers(bundled_pair, task, tmp_path):
    arms = arms_of("top_k:k=4")
    settings = RunSettings(
        task="arithmetic", limit=2, sampling=SamplingSettings(temperature=1.0, draft_temperature=0.5)
    )
    with PairServer(bundled_pair, RULES) as server:
        engine = engine_of(server)
        with pytest.raises(SpecError, match="draft_temperature cannot be set on a server"):
            Run(RunConfig.of(engine, arms, settings), arms, engine, task, tmp_path).measure()


@pytest.mark.slow
def test_speed_under_load_is_measured_in_turns_and_resumes(bundled_pair, short, tmp_path):
    arms = arms_of(ARMS[1])
    speed = SpeedSettings(concurrency=(1, 3), turns=2, num_requests=3)
    with PairServer(bundled_pair, RULES) as server:
        engine = engine_of(server, parallel=1)  # of the answers; the measurement sends more at once
        config = RunConfig.of(engine, arms, dataclasses.replace(SETTINGS, limit=3))
        run = run_arms(config, arms, engine, short, tmp_path)
        assert server.most_waiting == 1
        rows = measure_throughput(engine, config, short, arms, speed, tmp_path)
        assert server.most_waiting > 1
        again = measure_throughput(engine, config, short, arms, speed, tmp_path)
        kept = (tmp_path / FILE).read_text().splitlines()
        (tmp_path / FILE).write_text("\n".join(kept[:-1]) + "\n")
        num_before = len(server.requests)
        measure_throughput(engine, config, short, arms, speed, tmp_path)
        assert len(server.requests) == num_before + 4  # one turn: a warm-up and three requests
    assert rows == again and len(rows) == 4 and len(kept) == 8
    assert [json.loads(line)["arm"] for line in kept[:4]] == [
        arms[0].label,
        arms[1].label,
        arms[1].label,
        arms[0].label,
    ]
    judge = rows[2]
    assert judge.concurrency == 1 and judge.num_requests == 3 and judge.num_rescued > 0
    assert judge.vs_lossless > 0 and judge.first_s[1] >= judge.first_s[0] > 0
    dataclasses.replace(summarise(run), throughput=rows).write(tmp_path)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "Under load" in page and "requests at once" in page and "vllm 0.32.0 (v1)" in page


def test_concurrency_requires_a_server_engine(capsys):
    assert main(["bench", "--concurrency", "1,8"]) == 2
    assert "--concurrency requires a server engine (--engine vllm)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_certificate_names_the_engine_and_its_noise_floor(bundled_pair, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    certify = ["certify", *SMALL, "--rule", "judge", "--thresholds", "0.02", "--max-drop", "0.8"]
    certify += ["--num-draft-tokens", "8", "--limit", "8", "--held-out-limit", "4", "--dtype", "float32", "--out", "c"]
    with PairServer(bundled_pair, RULES) as server:
        assert main([*certify, "--engine", f"openai:url={server.url}"]) in (0, 1), capsys.readouterr().err
    said = capsys.readouterr().out
    assert "Noise floor: two lossless runs gave the same answer to 100.0% of 8 problems" in said
    [path] = (tmp_path / "c").glob("judge-*.json")
    made = json.loads(path.read_text())
    conditions = made["conditions"]
    assert (conditions["engine"], conditions["engine_version"], conditions["runner"]) == ("vllm", "0.32.0", "v1")
    assert made["calibration"]["noise_floor"]["same_answers"] == 1.0 and "on vllm 0.32.0 (v1)" in made["statement"]


@pytest.mark.slow
def test_monitoring_repeats_each_request_with_the_rule_off(bundled_pair, capsys):
    monitor = ["monitor", *SMALL, "--rule", "judge:threshold=0.04", "--share", "1"]
    monitor += ["--limit", "2", "--num-draft-tokens", "8"]
    with PairServer(bundled_pair, RULES) as server:
        assert main([*monitor, "--dtype", "float32", "--engine", f"openai:url={server.url}"]) == 0
    assert "final: 2 of 2 answers checked" in capsys.readouterr().out
    assert sum(request.get("vllm_xargs") == {"reprieve_rule": "off"} for request in server.requests) == 2
