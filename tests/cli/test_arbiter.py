"""CoSpec from the command line."""

import dataclasses
import json

import pytest

from cospec_branches import Branches
from recipes.arbiter.reinforce import Reinforce
from reprieve.cli.main import main, run_command
from reprieve.engine import Pair
from reprieve.mining.store import LabelStore
from tests.kit.pairs import SMALL
from tests.kit.tiny import NumberTokenizer, perturbed, tiny_model


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return Pair(target, perturbed(target, noise=0.05), NumberTokenizer(), "tiny/target", "tiny/draft")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "arbiter", "--preset", "huge"], "--preset must be one of paper, small"),
        (["train", "arbiter", "--rank", "0"], "rank must be in [1, 4096]"),
        (["train", "arbiter", "--labels", "/nowhere"], "is not a label store"),
        (["train", "arbiter", "--num-draft-tokens", "8"], "unknown flag --num-draft-tokens"),
        (["mine", "arbitration", "--tie", "2"], "tie must be in"),
        (["mine", "arbitration", "--max-mismatches", "0"], "max_mismatches must be 1 or more"),
    ],
)
def test_bad_usage_is_reported(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) in (1, 2)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required: --start"),
        (["--start", "none", "--group-size", "1"], "group_size must be 2 or more"),
        (["--start", "o/arbiter", "--out", "o"], "--start must not be the folder that --out writes"),
    ],
)
def test_bad_usage_of_reinforcement_is_reported(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(Reinforce, arguments) in (1, 2)
    assert told in capsys.readouterr().err


def test_refused_commands_leave_no_files(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    climb = [*SMALL, "--start", "none", "--out", "rl"]
    assert run_command(Reinforce, [*climb, "--draft-temperature", "-1"]) == 2
    assert "draft_temperature must be in [0, 100], got -1.0" in capsys.readouterr().err
    assert main(["train", "arbiter", *SMALL, "--draft-temperature", "0", "--out", "sft"]) == 2
    assert "unknown flag --draft-temperature" in capsys.readouterr().err
    manifest = {**dataclasses.asdict(pair.identity), "miner": "arbitration", "task": "parity", "num_draft_tokens": 4}
    LabelStore(tmp_path / "old", manifest)
    assert main(["train", "arbiter", *SMALL, "--labels", "old", "--out", "sft"]) in (1, 2)
    told = capsys.readouterr().err
    assert "--labels must hold labels of version 2, 'old' has None" in told
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.slow
def test_the_whole_method_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Mine, warm up, reinforce, audit and decode with the bundled pair, at the smallest sizes."""
    monkeypatch.chdir(tmp_path)
    mine = ["mine", "arbitration", *SMALL, "--num-draft-tokens", "8", "--max-mismatches", "1"]
    assert main([*mine, "--limit", "3", "--max-new-tokens", "64"]) == 0
    assert main(["train", "arbiter", *SMALL, "--preset", "small", "--epochs", "1", "--out", "sft"]) == 0
    small = ["--prompts-per-update", "1", "--group-size", "2", "--updates", "1", "--validation", "2"]
    small += ["--validation-temperature", "1", "--num-draft-tokens", "8", "--max-new-tokens", "40"]
    climb = [*SMALL, "--start", "sft/arbiter", "--preset", "small", *small, "--out", "rl"]
    assert run_command(Reinforce, climb) == 0
    before = (tmp_path / "rl" / "metrics.jsonl").read_text()
    assert run_command(Reinforce, climb) == 0
    assert (tmp_path / "rl" / "metrics.jsonl").read_text() == before, "again: there is nothing left to do"
    audit = [*SMALL, "--rule", "arbiter:path=rl/arbiter", "--limit", "2", "--max-new-tokens", "40"]
    audit += ["--out", "audit.json"]
    assert run_command(Branches, audit) == 0
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["num_draft_tokens"] == 8 and found["diagnosis"]["num_problems"] == 2
    assert run_command(Branches, [*audit, "--temperature", "1", "--seed", "3", "--limit", "1"]) == 0
    sampled = json.loads((tmp_path / "audit.json").read_text())
    assert (sampled["sampling"]["temperature"], sampled["seed"]) == (1.0, 3) and sampled["diagnosis"][
        "num_problems"
    ] == 1
    ask = ["generate", *SMALL, "Question: what is 1 + 2?\nAnswer:", "--json"]
    assert main([*ask, "--rule", "arbiter:path=rl/arbiter"]) == 0
    assert "best at update" in capsys.readouterr().out
