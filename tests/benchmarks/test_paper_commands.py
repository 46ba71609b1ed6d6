"""The papers' own protocols, as commands of `benchmarks/`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from arc_audit import AuditCommand
from arc_rejections import Rejections
from cospec_branches import Branches
from fsd_thresholds import Thresholds
from recipes.arbiter.reinforce import Reinforce
from reprieve.cli.flags import parser_of
from reprieve.cli.main import run_command
from reprieve.rules import RULES, parse_rule
from study import STUDIED, usual_rules
from tables import audits_table, branches_table, rejections_table
from tests.kit.pairs import SMALL


@pytest.mark.parametrize(
    ("kind", "arguments", "told"),
    [
        (AuditCommand, ["lts:theta=x"], "theta"),
        (AuditCommand, ["lts", "--active", "0"], "--active must be 2 or more, got 0"),
        (AuditCommand, ["lts", "--out", "."], "--out must name a file, got '.'"),
        (Rejections, ["--limit", "0"], "arc_rejections.py: limit must be in [1, 10000000], got 0"),
        (Rejections, ["--out", "."], "--out must name a file, got '.'"),
        (Rejections, ["--drafter", "oracle"], "drafter must be one of draft, eagle3, ngram"),
        (Rejections, ["--nli", "/nowhere"], "could not load --nli '/nowhere'"),
        (AuditCommand, ["direct:top_k:k=2"], "'direct:top_k:k=2' has no rule"),
        (AuditCommand, ["lts:path=/nowhere"], "'/nowhere' is neither a folder nor a hub id"),
        (AuditCommand, ["margin", "--drafter", "eagle3:path=/nowhere"], "'/nowhere' is neither a folder nor a hub id"),
        (Branches, ["--limit", "0"], "cospec_branches.py: limit must be in [1, 10000000]"),
        (Branches, ["--rule", "arbiter:lambda=7"], r"lambda must be in [0, 1], got 7.0"),
        (Branches, ["--rule", "fuzzy"], "must decide each mismatch by its risk alone"),
        (Branches, ["--rule", "lossless"], "--rule must let something pass"),
        (Branches, ["--num-draft-tokens", "0"], "--num-draft-tokens must be in [1, 512]"),
        (Branches, ["--num-draft-tokens", "auto"], "must be a whole number, got 'auto'"),
        (Branches, ["--rule", "margin:delta=2", "--temperature", "1"], "only arbiter rules have both"),
        (Branches, ["--temperature", "-1"], "temperature must be in [0, 1e+06]"),
        (Branches, ["--rule", "arbiter:path=nowhere"], "neither a folder nor a hub id"),
    ],
)
def test_bad_usage_is_reported(kind, arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(kind, arguments) in (1, 2)
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_accepted_and_refused_tokens_are_audited(tmp_path):
    rule = "lts:theta=0.9"
    report = tmp_path / "audit.json"
    assert (
        run_command(
            AuditCommand,
            [
                *SMALL,
                rule,
                "top_k:k=2",
                "--calibration",
                "reprieve/arithmetic-lts",
                "--limit",
                "2",
                "--out",
                str(report),
            ],
        )
        == 0
    )
    document = json.loads(report.read_text())
    assert "2 arithmetic problems, test" in audits_table({}, document)
    lts, top_k = document["audits"]
    assert lts["accepted"]["num"] > 50 and 0 <= lts["accepted"]["within_bound"] <= 1
    assert top_k["rescued"]["num"] > 0 and "within_tolerance" in top_k["rescued"]
    refused = tmp_path / "rejections.json"
    assert run_command(Rejections, [*SMALL, "--limit", "2", "--out", str(refused)]) == 0
    document = json.loads(refused.read_text())
    assert "2 arithmetic problems, test" in rejections_table({}, document)
    found = document["rejections"]
    assert found["num_refused"] > 5 and 0 < found["answer"]["tokens"][0] <= found["answer"]["places_any"][0] <= 1


@pytest.mark.slow
def test_branches_are_written_for_a_table(tmp_path):
    report = tmp_path / "branches.json"
    assert run_command(Branches, [*SMALL, "--limit", "1", "--out", str(report)]) == 0
    assert "1 arithmetic problems, test" in branches_table({}, json.loads(report.read_text()))


def test_a_study_leaves_out_rules_without_a_head():
    rules = usual_rules(("judge",))
    names = {name.partition(":")[0] for name in rules}
    assert {"judge", "margin", "typical", "fly"} <= names
    assert "pivot" not in names, "its head is not there"


def test_a_study_measures_every_rule_but_two():
    built_in = {kind.name for kind in RULES if kind.__module__.startswith("reprieve.rules.")}
    assert built_in == {*STUDIED, "lossless", "lts"}  # lossless is always measured
    for name, settings in STUDIED.items():
        assert {parse_rule(spec).name for spec in settings} == {name}


def test_script_commands_on_the_papers_page_use_existing_flags():
    """`tests/test_docs.py` does the same for `reprieve` commands."""
    text = (Path(__file__).parents[2] / "docs" / "papers" / "index.md").read_text()
    lines = re.findall(r"(?:`|^\$ )(python [^`\n]* --config [^`\n]*)", text, flags=re.M)
    kinds = {kind.verb: kind for kind in (AuditCommand, Branches, Rejections, Reinforce, Thresholds)}
    kinds["recipes.arbiter.reinforce"] = Reinforce
    assert len(lines) >= 5
    for line in lines:
        words = [word for word in shlex.split(line)[1:] if word != "-m"]
        parser_of(kinds[words[0]], prog=words[0]).parse_args(words[1:])  # exits on an unknown flag
