"""`quickstart`: checks before any work, refusals, and resuming after an interruption."""

import io
import json
from pathlib import Path

import pytest

from reprieve.cli import quickstart, screen, trial
from reprieve.cli.command import Pipeline
from reprieve.cli.main import main
from reprieve.errors import ReprieveError
from reprieve.tasks import load_task
from tests.kit.pairs import SMALL


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems = load_task("arithmetic").problems("train", 160)
    rows = [{"question": problem.question, "answer": problem.reference} for problem in problems]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.txt").write_text("Question: {question}\nAnswer:")
    return tmp_path / "q.jsonl"


FLAGS = ["--grader", "number", "--prompt-template", "t.txt", "--max-new-tokens", "200"]


def test_dry_run_prints_the_plan_and_what_can_be_proved(data, capsys):
    assert main(["quickstart", *SMALL, "--data", str(data), *FLAGS, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "train" in said.out and "prompts: raw prompts" in said.out and "were right" in said.out
    assert "plan: mine" in said.out and "cannot prove a loss below 5 points and growth below 25%: " in said.err
    assert "no certificate, compare on" in said.out and "certify a loss" not in said.out
    plain = ["--data", str(data), "--grader", "number", "--prompt-template", "t.txt"]
    easy = ["--max-drop", "0.9", "--max-growth", "10"]
    with pytest.warns(UserWarning, match=r"max_new_tokens is \d+ instead of 1024: the models read"):
        assert main(["quickstart", *SMALL, *plain, *easy, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "provable: a loss below 90 points" in said and "certify a loss below 90 points" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "either --data FILE.jsonl or --task, got neither"),
        (["--data", "q.jsonl", "--task", "arithmetic"], "either --data FILE.jsonl or --task, got both"),
        (["--data", "q.jsonl", "--template", "xml"], "template must be one of auto, chat, raw"),
        (["--data", "q.jsonl", "--thinking", "on"], "needs the chat template"),
        (["--data", "nowhere.jsonl"], "No such file"),
        (["--task", "prompts:path=q.jsonl"], "no reference answers"),
    ],
)
def test_bad_usage_is_refused(data, capsys, given, said):
    assert main(["quickstart", *SMALL, *given]) in (1, 2)
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_row_without_a_readable_answer_is_left_out_and_named(data, recwarn):
    row = '{"question": "How many?", "answer": "some words"}'
    data.write_text("\n".join([*data.read_text().splitlines(), row]) + "\n")
    assert main(["quickstart", *SMALL, "--data", str(data), *FLAGS, "--dry-run"]) == 0
    said = [str(item.message) for item in recwarn]
    named = "line 161: grader number finds no answer in field 'answer', got 'some words'"
    assert any("1 rows of" in text and named in text for text in said)


def test_a_file_without_any_readable_answer_is_refused(data, capsys):
    data.write_text('{"question": "How many?", "answer": "some words"}\n')
    assert main(["quickstart", *SMALL, "--data", str(data), *FLAGS]) == 1
    assert "line 1: grader number finds no answer in field 'answer', got 'some words'" in capsys.readouterr().err


def test_it_stops_before_any_work_if_no_answer_can_be_read(data, capsys):
    (data.parent / "t.txt").write_text("{question} Never mind:")
    limits = ["--mine-limit", "2", "--certify-limit", "2", "--max-new-tokens", "4", "--out", "unread"]
    assert main(["quickstart", *SMALL, "--data", str(data), *FLAGS[:4], *limits]) == 1
    said = capsys.readouterr()
    assert "no answer could be read: check --grader and the prompt" in said.err
    assert "--allow-unread continues anyway" in said.err
    assert not Path("unread").exists()


@pytest.mark.slow
def test_it_stops_if_no_answer_is_right_and_asks_on_a_terminal(data, capsys, monkeypatch):
    rows = [json.loads(line) | {"answer": "-1234567"} for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["quickstart", *SMALL, "--data", str(data), *FLAGS, "--out", "wrong"]
    assert main(command) == 1
    said = capsys.readouterr()
    assert "none of 4 answers was right: check --answer, --grader and the prompt" in said.err
    assert "The right answer to the first problem is '-1234567'" in said.err and not Path("wrong").exists()
    monkeypatch.setattr(screen.sys, "stdin", Terminal("y\n"))
    monkeypatch.setattr(Pipeline, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(command) == 130, "it went on"
    assert "Continue anyway? [y/N]" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_stage_that_fails_leaves_a_report_and_a_strict_policy(data, capsys, monkeypatch):
    ran, folders = [], []

    def run(self, name, command, **_):
        ran.append(name)
        folders.append(getattr(command, "out", None))
        if name == "train":
            raise ReprieveError("one class only")
        return 0

    monkeypatch.setattr(Pipeline, "run", run)
    assert main(["quickstart", *SMALL, "--data", str(data), *FLAGS, "--out", "failed"]) == 1
    assert ran == ["mine", "train", "bench", "report"]
    assert folders[2] == Path("failed") / "bench-untrained", "the next run's arms are others"
    assert json.loads((Path("failed") / "policy.json").read_text()) == {"rule": "margin:delta=1", "default": "strict"}
    assert "one class only. The report and a strict policy follow" in capsys.readouterr().err


def test_without_enough_problems_nothing_is_certified_and_the_policy_is_strict(data, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(Pipeline, "run", lambda self, name, command, **_: ran.append(name) or 0)
    small = ["--mine-limit", "6", "--certify-limit", "3", "--workers", "1", "--out", "few"]
    assert main(["quickstart", *SMALL, "--data", str(data), *FLAGS, *small]) == 0
    assert ran == ["mine", "train", "bench", "report"]
    assert "no certificate: the policy decodes losslessly" in capsys.readouterr().err
    assert json.loads((Path("few") / "policy.json").read_text())["default"] == "strict"


@pytest.mark.slow
def test_it_turns_a_file_into_a_certificate_despite_interruptions(data, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "_THRESHOLDS", (0.05,))
    monkeypatch.setattr(quickstart, "_COMPARED", 2)
    monkeypatch.setattr(trial, "_NUM_TRIED", 1)
    problems = load_task("arithmetic").problems("train", 1000)
    easy = [problem for problem in problems if len(problem.steps) == 2 and problem.family != "share"]  # short answers
    rows = [{"question": problem.question, "answer": problem.reference} for problem in easy]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = []
    run = Pipeline.run

    def interrupted(self, name, command, **options):
        status = run(self, name, command, **options)
        stages.append(name)
        if len(stages) in (1, 2, 3):
            raise KeyboardInterrupt
        return status

    monkeypatch.setattr(Pipeline, "run", interrupted)
    small = ["--mine-limit", "6", "--certify-limit", "10", "--max-drop", "0.9", "--max-growth", "10"]
    form = [*FLAGS[:4], "--max-new-tokens", "100"]
    command = ["quickstart", *SMALL, "--data", str(data), *form, *small, "--workers", "1", "--out", "out"]
    assert [main(command) for _ in range(4)] == [130, 130, 130, 0]
    said = capsys.readouterr().out
    assert "loses less than 90 points" in said and "reprieve serve" in said and "--engine vllm" in said
    certificate = json.loads(next(Path("out").glob("certificates/judge-*.json")).read_text())
    assert certificate["verdict"] in ("confirmed", "consistent") and certificate["calibration"]["limit"] == 10
    assert (Path("out") / "report.html").exists() and json.loads((Path("out") / "policy.json").read_text())
