"""What 0.1 wrote still loads: runs, heads, certificates, label stores (tests/fixtures/v0.1, made with 0.1.0)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from reprieve.cli.main import main
from reprieve.heads.loading import load_head
from tests.kit.pairs import SMALL

OLD = Path(__file__).parent / "fixtures" / "v0.1"
JUDGE = "judge:path=reprieve/arithmetic-judge,threshold=0.04"


@pytest.fixture
def old(tmp_path, monkeypatch):
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_on_where_it_stopped(old):
    before = (old / "run" / "problems.jsonl").read_text().splitlines()
    numbers = json.loads((old / "run" / "results.json").read_text())
    (old / "run" / "problems.jsonl").write_text("\n".join(before[:-1]) + "\n")
    arms = ["--arm", JUDGE, "--arm", "margin:delta=3"]
    assert main(["bench", *SMALL, *arms, "--limit", "2", "--num-draft-tokens", "8", "--out", "run"]) == 0
    after = (old / "run" / "problems.jsonl").read_text().splitlines()
    assert after[:-1] == before[:-1]
    assert json.loads(after[-1])["text"] == json.loads(before[-1])["text"]
    document = json.loads((old / "run" / "results.json").read_text())
    for arm, was in zip(document["arms"], numbers["arms"], strict=True):
        assert was.keys() <= arm.keys() | {"seconds_by_part"}
        for key in ("spec", "params", "accuracy", "num_rescued", "tokens_per_round", "acceptance_rate"):
            assert arm[key] == was[key], key


def test_a_report_of_an_old_run_is_written(old):
    assert main(["report", "run", "--out", "report.html"]) == 0
    assert "margin:delta=3" in (old / "report.html").read_text()


def test_a_head_and_a_certificate_still_serve(old):
    assert load_head("head").kind == "judge"
    arms = ["--arm", "judge:path=head", "--arm", "certified:certificate.json"]
    assert main(["bench", *SMALL, *arms, "--limit", "1", "--num-draft-tokens", "8", "--out", "new"]) == 0
    specs = [arm["spec"] for arm in json.loads((old / "new" / "results.json").read_text())["arms"]]
    assert specs[-1] == JUDGE


def test_a_label_store_trains_and_grows(old, capsys):
    assert main(["labels", "stats", "labels"]) == 0
    assert "30 labelled mismatches, 2 important" in capsys.readouterr().out
    assert main(["train", "judge", *SMALL, "--labels", "labels", "--out", "trained"]) == 0
    # 0.1 read more rows in a forward than the head needs, which moves the states by rounding.
    torch.testing.assert_close(load_head("trained").weights["weight"], load_head("head").weights["weight"])
    assert main(["mine", "autojudge", *SMALL, "--limit", "2", "--out", "labels"]) == 0
    assert "mined now: 0, there before: 2" in capsys.readouterr().out


def test_a_verb_that_was_renamed_says_its_new_name(capsys):
    assert main(["judge", "run", "--judge", "x"]) == 2
    assert "verdicts" in capsys.readouterr().err
