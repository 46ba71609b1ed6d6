"""Mining with a target on servers: the same labels as the local engine, and many rollouts per request."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

import reprieve
from reprieve.backends.settings import EngineSettings
from reprieve.cli.main import main
from reprieve.errors import EngineError, SpecError
from reprieve.mining.building import build
from reprieve.mining.runner import mine_problems
from reprieve.mining.settings import AutoJudgeMining, PivotMining, TraceMining
from reprieve.mining.store import LabelStore
from reprieve.settings import PairSettings, PromptSettings, SamplingSettings
from tests.kit.pairs import ARITHMETIC, SMALL
from tests.kit.servers import PairServer
from tests.mining.toys import SHORT

PAIR = PairSettings(ARITHMETIC.name, dtype="float32")


def mined(settings, folder):
    bench = build(settings)
    store = LabelStore(folder, bench.manifest)
    report = mine_problems(bench.miner, bench.problems, store, num_in_flight=settings.in_flight)
    assert not report.errors, report.errors
    return bench, [dataclasses.replace(problem, seconds=0.0) for problem in store.problems()]


def small(limit, length=24):
    return {"task": "arithmetic", "pair": PAIR, "limit": limit, "prompt": PromptSettings(max_new_tokens=length)}


def on(server):
    return EngineSettings(f"openai:url={server.url}")


@pytest.mark.slow
def test_labels_equal_the_local_engines(bundled_pair, short, tmp_path):
    settings, ours = short
    with PairServer(bundled_pair) as server:
        bench, theirs = mined(dataclasses.replace(settings, engine=on(server)), tmp_path)
    assert theirs == [ours]
    assert bench.manifest["engine"] == "vllm 0.32.0" and bench.manifest["target_weights"]
    assert all(isinstance(request["prompt"], list) for request in server.requests)  # prompts are sent as token ids
    assert settings.in_flight == 16 and dataclasses.replace(settings, engine=on(server)).in_flight == 256


@pytest.mark.slow
def test_all_rollouts_of_a_position_are_one_request(bundled_pair, tmp_path):
    sampling = SamplingSettings(temperature=0.6, top_p=0.95, top_k=20)
    with PairServer(bundled_pair) as server:
        settings = PivotMining(num_rollouts=3, sampling=sampling, **small(1, 16), engine=on(server))
        _, [problem] = mined(settings, tmp_path)
    rollouts = [request for request in server.requests if "prompt_logprobs" not in request]
    assert {request["n"] for request in rollouts} == {3} and rollouts[0]["temperature"] == 0.6
    assert problem.mismatches and all(mismatch.num_rollouts == 3 for mismatch in problem.mismatches)


@pytest.mark.slow
def test_walks_on_servers_equal_local_walks(bundled_pair, tmp_path):
    """The same drafted tokens are rejected, and the same fallbacks are drawn."""
    sampling = SamplingSettings(temperature=0.6, top_p=0.95, top_k=20)
    settings = PivotMining(num_rollouts=1, alpha=0.0, sampling=sampling, **small(2))  # nothing is a pivot
    _, ours = mined(settings, tmp_path / "local")
    with PairServer(bundled_pair) as server:
        _, theirs = mined(dataclasses.replace(settings, engine=on(server)), tmp_path / "served")
    for one, other in zip(ours, theirs, strict=True):
        assert one.mismatches and one.response_ids == other.response_ids
        walks = [[(item.position, item.draft_id, item.target_id) for item in x.mismatches] for x in (one, other)]
        assert walks[0] == walks[1]


def test_end_tokens_and_chat_template_come_from_the_targets_files(tmp_path):
    """The draft stands in for a target with other end-of-text tokens and another chat template."""
    names = {}
    for role in ("target", "draft"):
        names[role] = str(tmp_path / role)
        shutil.copytree(ARITHMETIC.role_folder(role), names[role])
    tokenizer = AutoTokenizer.from_pretrained(names["target"])
    tokenizer.chat_template = "{% for message in messages %}<<{{ message['content'] }}>>{% endfor %}"
    tokenizer.save_pretrained(names["target"])
    ends = GenerationConfig.from_pretrained(names["target"])
    ends.eos_token_id = [tokenizer.eos_token_id, 17]
    ends.save_pretrained(names["target"])
    pair = reprieve.load_pair(**names, dtype="float32")
    told = {}
    with PairServer(pair) as server:
        for answering in (EngineSettings(), on(server)):
            for kind in (TraceMining, AutoJudgeMining):
                settings = kind(limit=1, pair=PairSettings(**names, dtype="float32"), engine=answering,
                                prompt=PromptSettings(chat_template=True))  # fmt: skip
                bench = build(settings)
                form = bench.miner.responses
                told[answering.local, kind] = form.eos_ids, form.encode_prompt(bench.problems[0])
    assert told[True, TraceMining] == told[False, TraceMining] == told[False, AutoJudgeMining]
    assert 17 in told[False, TraceMining][0]


@pytest.mark.slow
def test_a_server_that_dies_during_a_walk_loses_no_labels(bundled_pair, tmp_path):
    settings = TraceMining(**small(3), num_draft_tokens=4, num_in_flight=1)
    with PairServer(bundled_pair, dies_after=20) as server:
        bench = build(dataclasses.replace(settings, engine=on(server)))
        store = LabelStore(tmp_path, bench.manifest)
        with pytest.raises(EngineError, match="run again to resume"):
            mine_problems(bench.miner, bench.problems, store, num_in_flight=1)
    done = {problem.problem_id for problem in LabelStore(tmp_path).problems()}
    assert 1 <= len(done) < 3
    with PairServer(bundled_pair) as server:
        bench = build(dataclasses.replace(settings, engine=on(server)))
        assert mine_problems(bench.miner, bench.problems, store, num_in_flight=1).num_mined == 3 - len(done)


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.mining.test_served_target import PAIR, build, mine_problems
from reprieve.mining.settings import TraceMining
from reprieve.mining.store import LabelStore
from reprieve.backends.settings import EngineSettings
engine = EngineSettings(f"openai:url={sys.argv[1]}")
bench = build(TraceMining(limit=64, task="arithmetic", pair=PAIR, num_draft_tokens=4, engine=engine))
store = LabelStore(Path(sys.argv[2]), bench.manifest)
threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()
assert mine_problems(bench.miner, bench.problems, store, num_in_flight=64).interrupted
print("interrupted")
"""


@pytest.mark.slow
def test_an_interrupted_command_ends(bundled_pair, tmp_path):
    """64 walks are in flight, and none may keep the process alive."""
    with PairServer(bundled_pair) as server:
        command = [sys.executable, "-c", INTERRUPTED, server.url, str(tmp_path)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert made.returncode == 0 and "interrupted" in made.stdout, made.stderr
    assert "never awaited" not in made.stderr


@pytest.mark.parametrize("kind", [PivotMining, TraceMining])
@pytest.mark.parametrize("top_k", [0, 21])
def test_more_candidates_than_servers_return_are_refused(kind, top_k):
    sampling = SamplingSettings(temperature=0.6, top_k=top_k)
    assert kind(sampling=sampling).num_in_flight is None
    with pytest.raises(SpecError, match=rf"top_k must be in \[1, 20\] where the target is on servers.*got {top_k}"):
        kind(sampling=sampling, engine=EngineSettings("vllm"))


@pytest.mark.slow
def test_traces_on_a_server_equal_local_traces(bundled_pair, tmp_path):
    settings = TraceMining(**small(2), num_draft_tokens=4)
    _, ours = mined(settings, tmp_path / "local")
    with PairServer(bundled_pair) as server:
        _, theirs = mined(dataclasses.replace(settings, engine=on(server)), tmp_path / "served")
    assert theirs == ours and server.requests


@pytest.mark.slow
def test_a_server_that_dies_loses_no_labels(bundled_pair, short, tmp_path, capsys):
    settings, labels = short
    mine = [
        "mine",
        "autojudge",
        *SMALL,
        "--offset",
        str(SHORT - 1),
        "--limit",
        "2",
        "--in-flight",
        "1",
        "--dtype",
        "float32",
    ]
    mine += ["--out", str(tmp_path)]
    with PairServer(bundled_pair) as server:
        manifest = build(dataclasses.replace(settings, engine=on(server))).manifest
        LabelStore(tmp_path, manifest).append(labels)  # the second problem's
    with PairServer(bundled_pair, dies_after=2) as server:
        assert main([*mine, "--engine", f"openai:url={server.url}"]) == 1
    error = capsys.readouterr().err
    assert "does not answer" in error and "1 labelled problems are kept, run again to resume" in error
    with PairServer(bundled_pair) as server:
        assert main([*mine, "--engine", f"openai:url={server.url}"]) == 0
    assert "mined now: 1, there before: 1" in capsys.readouterr().out
    assert len(LabelStore(tmp_path).problems()) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(sampling=SamplingSettings(temperature=1.0)), "temperature must be 0 on servers"),
        (dict(api_url="http://x", pair=PairSettings("a", "b")), "api_url and engine both say"),
    ],
)
def test_settings_that_servers_do_not_support_are_refused(settings, said):
    with pytest.raises(SpecError, match=said):
        AutoJudgeMining(engine=EngineSettings("vllm"), **settings)


def test_workers_require_the_local_engine(capsys):
    assert main(["mine", "autojudge", "--engine", "vllm", "--workers", "2"]) == 2
    assert "workers must be 1 on servers, got 2" in capsys.readouterr().err


def test_a_dead_server_fails_at_once():
    with pytest.raises(EngineError, match="does not answer"):
        build(
            AutoJudgeMining(
                limit=1, task="arithmetic", pair=PAIR, engine=EngineSettings("openai:url=http://127.0.0.1:9")
            )
        )
