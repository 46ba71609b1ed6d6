"""The command line, end to end on the bundled pair: output formats, exit statuses and error messages."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from reprieve.cli.flags import flags_of, parse
from reprieve.cli.main import COMMANDS, command_of, main
from tests.kit.pairs import SMALL

QUESTION = "Anna has 23 apples. She buys 18 more apples. She gives away 9 apples. How many apples does Anna have now?"


def test_generate_json_accounts_for_every_token(capsys):
    assert main(["generate", *SMALL, QUESTION, "--rule", "margin:delta=6", "--json", "--trace"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "The final answer is" in answer["text"]
    assert answer["finish_reason"] == "eos"
    kinds = [token["provenance"] for token in answer["tokens"]]
    assert set(kinds) == {"target", "matched", "rescued"}
    assert kinds.count("rescued") == answer["num_rescued"]
    assert len(kinds) == answer["num_tokens"] == sum(len(entry["committed"]) for entry in answer["rounds"])
    assert len(answer["rounds"]) == answer["num_rounds"]


def test_generate_streams_text_and_colours_by_provenance(capsys):
    assert main(["generate", *SMALL, QUESTION, "--rule", "margin:delta=6", "--color"]) == 0
    colored = capsys.readouterr().out
    assert "\x1b[32m" in colored
    assert "\x1b[1;33m" in colored
    assert main(["generate", *SMALL, QUESTION, "--rule", "margin:delta=6", "--no-color"]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_generate_obeys_budget_stop_and_seed(capsys):
    def run(*extra):
        assert main(["generate", *SMALL, QUESTION, "--json", *extra]) == 0
        return json.loads(capsys.readouterr().out)

    assert run("--max-new-tokens", "5")["num_tokens"] == 5
    stopped = run("--stop", "final answer")
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"].endswith("The ")
    sampled = [run("--temperature", "1.5", "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    assert run("--drafter", "ngram")["text"] == run()["text"]


def test_bench_writes_results_records_and_figure_and_resumes(tmp_path, capsys):
    out = str(tmp_path / "run")
    command = ["bench", *SMALL, "--arm", "top_k:k=4", "--arm", "fuzzy:threshold=0.2", "--limit", "3", "--out", out]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "top_k:k=4" in table
    assert "target_only" in table
    document = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [arm["spec"] for arm in document["arms"]] == [
        "target_only", "draft_only", "lossless", "top_k:k=4", "fuzzy:threshold=0.2",
    ]  # fmt: skip
    assert document["complete"]
    assert (tmp_path / "run" / "frontier.svg").exists()
    lines = (tmp_path / "run" / "problems.jsonl").read_text()
    assert main(command) == 0
    assert (tmp_path / "run" / "problems.jsonl").read_text() == lines
    assert main([*command[:-4], "--limit", "2", "--out", out]) == 1
    assert "another run, with limit = 3 instead of 2" in capsys.readouterr().err
    assert main(["mine", "autojudge", *SMALL, "--limit", "1", "--out", out]) == 1
    assert "holds a run of `reprieve bench`; name another folder" in capsys.readouterr().err
    assert "command: bench" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_lists_make_an_arm_for_each_value_and_k_and_the_fastest_is_reported(tmp_path, capsys):
    out = str(tmp_path / "run")
    arguments = ["--arm", "margin:delta=1,4", "--num-draft-tokens", "4,8", "--limit", "2", "--out", out]
    assert main(["bench", *SMALL, *arguments]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"fastest: --arm margin:delta=4@K=[48] ", printed)
    assert "2 problems: too few to compare these speeds; measure again with --limit 100 or more" in printed
    specs = [arm["spec"] for arm in json.loads((tmp_path / "run" / "results.json").read_text())["arms"]]
    assert specs[2:] == [f"{rule}@K={k}" for k in (4, 8) for rule in ("lossless", "margin:delta=1", "margin:delta=4")]


@pytest.mark.slow
def test_a_demo_that_is_run_again_resumes(tmp_path, capsys):
    command = ["demo", "--limit", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    answers = (tmp_path / "problems.jsonl").read_text()
    assert "command: demo" in (tmp_path / "config.yaml").read_text()
    assert main(command) == 0
    assert (tmp_path / "problems.jsonl").read_text() == answers


@pytest.mark.slow
def test_ctrl_c_keeps_finished_answers_and_exits_130(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "reprieve.cli.main", "bench", *SMALL, "--limit", "500", "--out", str(out)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A test runner started in the background ignores the signal, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.time() + 120
    while time.time() < deadline:
        if (out / "problems.jsonl").exists() and (out / "problems.jsonl").read_text().count("\n") > 8:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    document = json.loads((out / "results.json").read_text())
    assert not document["complete"]
    assert document["num_problems"] >= 2


def test_a_prompt_without_end_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("reprieve.cli.generate._LARGEST_PROMPT", 3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"four")))
    assert main(["generate", "-"]) == 2
    assert "PROMPT must have at most 3 bytes, got more" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "-"]) == 2
    assert "PROMPT must hold text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 2, ""),
        (["serve-me"], 2, "unknown command 'serve-me'"),
        (["train", "juge"], 2, "did you mean judge?"),
        (["bench", "--judge", "gpt"], 2, "a judge is written openai:model=NAME,url=ADDRESS"),
        (["bench", "--judge", "openai:model=m", "--baseline", "typical"], 2, "baseline must be one of target_only"),
        (["bench", "--votes", "2"], 2, "--votes requires --judge"),
        (["bench", "--baseline", "target_only"], 2, "--baseline requires --judge"),
        (["generate", "x", "--device", "cuda:99"], 2, "device 'cuda:99' cannot be used with PyTorch"),
        (["generate", "x", "--device", "gpu"], 2, "device 'gpu' cannot be used with PyTorch"),
        (["generate", " "], 2, "PROMPT must hold text, got ' '"),
        (["generate"], 2, "the following arguments are required: PROMPT"),
        (["bench", "--limt", "3"], 2, "unknown flag --limt; did you mean --limit?"),
        (["bench", "--limit", "0"], 2, "limit must be in [1, 10000000], got 0"),
        (["bench", "--arm", "top_k:k=0"], 2, "k must be 1 or more, got 0"),
        (["bench", "--task", "gsm9k"], 2, "triviaqa, word_problems, got 'gsm9k'"),
        (["bench", "--split", "dev"], 2, "split must be one of train, validation, test, got 'dev'"),
        (["bench", "--drafter", "oracle"], 2, "drafter must be one of draft, eagle3, ngram, got 'oracle'"),
        (["bench", "--temperature", "-1"], 2, "temperature must be in [0, 1e+06], got -1.0"),
        (
            ["bench", "--num-draft-tokens", "0"],
            2,
            "num_draft_tokens must be a whole number in [1, 512], 'auto', or 'auto:path=FOLDER', got 0",
        ),
        (["bench", "--arm", "margin:delta=1,b"], 2, "margin: delta must be a number, got 'b'"),
        (["generate", "x", "--rule", "nope"], 2, "rule must be one of"),
        (["generate", "x", "--rule", "judge:path="], 2, "path must name a folder or a hub id, got nothing"),
        (["generate", "x", "--drafter", "oracle", "--target", "/nowhere"], 2, "drafter must be one of"),
        (["report", "a", "./a"], 1, "a report needs different folders, got a, a"),
        (["generate", "x", "--dtype", "int3"], 2, "dtype must be one of"),
        (["generate", "x", "--target", "/nowhere/at/all"], 1, "could not load the target '/nowhere/at/all'"),
        (["generate", "x", "--max-new-tokens", "9999"], 2, "has 512"),
        (["generate", "x", "--template", "chat"], 2, "--template chat needs a chat template"),
        (["generate", "x", "--thinking", "on"], 2, "--thinking needs a chat template"),
        (["generate", "x", "--trace"], 2, "--trace needs --json"),
        (["labels", "stats", "runs/none", "--top", "-1"], 2, "top must be 1 or more, got -1"),
        (["train", "lts", "--delta", "0"], 2, "delta must be in (0, 0.5], got 0.0"),
        (["train", "lts", "--limit", "0"], 2, "reprieve train lts: limit must be in [1, 10000000], got 0"),
        (["train", "lts", "--bucket-by", "depth"], 2, "bucket_by must be one of none, entropy, distance, margin"),
        (["train", "lts", "--active", "1"], 2, "active must be 2 or more, got 1"),
        (["bench", "--arm", "margin@drafter=draft@drafter=ngram"], 2, "names its own K and drafter once each"),
        (["bench", "--arm", "margin@drafter=oracle"], 2, "drafter must be one of draft, eagle3, ngram"),
        (["train", "eagle", "--steps", "0"], 2, "num_steps must be 1 or more, got 0"),
        (["train", "eagle", "--layers", "low"], 2, "argument --layers: must be a whole number, got 'low'"),
        (
            ["train", "eagle", *SMALL, "--layers", "2,4,99"],
            2,
            "layers must be different ones in [0, 8], got (2, 4, 99)",
        ),
        (["serve", "--port", "99999"], 2, "port must be in [0, 65535], got 99999"),
        (["serve", "--rule", "margin", "--rule", "margin"], 2, "rule margin:delta=1 is offered twice"),
        (["serve", "--max-waiting", "0"], 2, "max_waiting must be in [1, 1000000], got 0"),
        (["serve", "--rule", "/nowhere/policy.json"], 1, "cannot be read"),
    ],
)
def test_bad_usage_says_what_is_wrong(arguments, status, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert says in captured.err + captured.out
    assert "Traceback" not in captured.err
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_for_every_flag(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    assert f"usage: reprieve {command} " in capsys.readouterr().out
    undocumented = [flag.option for flag in flags_of(command_of(command)) if not flag.help]
    assert undocumented == []


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_begins_with_an_example_that_parses(command, capsys):
    kind = command_of(command)
    words = shlex.split(kind.example)
    assert words[: 1 + len(command.split())] == ["reprieve", *command.split()]
    parse(kind, words[1 + len(command.split()) :], command=command)  # raises if a flag or value is wrong
    assert main([*command.split(), "--help"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"example: {kind.example}"


@pytest.mark.parametrize("verb", ["mine", "train", "labels"])
def test_a_verb_of_several_commands_lists_them(verb, capsys):
    assert main([verb, "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS if name.startswith(f"{verb} "))
    assert main([verb]) == 2
    capsys.readouterr()
    assert main([verb, "nothing"]) == 2
    assert f"reprieve: unknown command '{verb} nothing'; {verb} takes " in capsys.readouterr().err


def test_rules_lists_every_rule_with_its_parameters(capsys):
    assert main(["rules"]) == 0
    listed = capsys.readouterr().out
    assert "fuzzy" in listed
    assert "divergence=js" in listed


@pytest.mark.slow
def test_calibrating_and_pruning_from_the_command_line(tmp_path, capsys):
    out = str(tmp_path / "lts")
    command = ["train", "lts", *SMALL, "--limit", "3", "--out", out]
    assert main([*command, "--bucket-by", "margin", "--buckets", "2"]) == 0
    told = capsys.readouterr().out
    assert "bucket 1" in told and f"--arm lts:path={out}" in told.replace("\n", "")
    assert main(command) == 0  # in the same folder, from the stored answers
    constants = capsys.readouterr().out
    assert "tau_delta" in constants and "bucket" not in constants
    rule = f"lts:path={out},theta=0.9"
    arms = ["--arm", f"{rule}@drafter=eagle3:top_k=2,prune=entropy", "--arm", "lossless@drafter=draft"]
    run = str(tmp_path / "run")
    asked = ["--limit", "2", "--temperature", "1", "--num-draft-tokens", "16", "--out", run]
    assert main(["bench", *SMALL, "--drafter", "eagle3", *arms, *asked]) == 0
    document = json.loads((tmp_path / "run" / "results.json").read_text())
    by_spec = {arm["spec"]: arm for arm in document["arms"]}
    assert list(by_spec)[-1] == "lossless@drafter=draft"
    assert by_spec[f"{rule}@drafter=eagle3:top_k=2,prune=entropy"]["pruned_share"] > 0
    assert by_spec["lossless"]["pruned_share"] == 0


@pytest.mark.slow
def test_a_drafting_head_is_trained_once_and_drafts_losslessly(tmp_path, capsys):
    pytest.importorskip("speculators")
    out = tmp_path / "eagle"
    command = ["train", "eagle", *SMALL, "--limit", "6", "--passes", "1", "--steps", "2", "--draft-vocab-size", "64",
               "--held-out", "0.2", "--out", str(out)]  # fmt: skip
    assert main(command) == 0
    assert f"eagle3:path={out / 'head'}" in capsys.readouterr().out.replace("\n", "")
    before = (out / "head" / "model.safetensors").read_bytes()
    assert main(command) == 0
    assert (out / "head" / "model.safetensors").read_bytes() == before, "nothing was left to do"
    assert json.loads((out / "head" / "training.json").read_text())["settings"]["draft_vocab_size"] == 64
    capsys.readouterr()
    assert main(["generate", *SMALL, QUESTION, "--drafter", f"eagle3:path={out / 'head'}", "--json"]) == 0
    drafted = json.loads(capsys.readouterr().out)["text"]
    assert main(["generate", *SMALL, QUESTION, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == drafted


def test_help_lists_every_command_with_its_summary(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, text) in COMMANDS.items():
        assert any(line.split() == [*name.split(), *text.split()] for line in lines), name
        assert text[0].islower() and not text.startswith(("what ", "which ", "how "))
