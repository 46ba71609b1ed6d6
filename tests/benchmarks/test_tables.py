"""Tables in the docs match the stored results, and every other measured number has a source."""

from __future__ import annotations

import json
import re

import pytest

import tables
from reprieve.errors import ReprieveError

ARM = {
    "spec": "margin:delta=2",
    "accuracy": 0.75,
    "accuracy_ci95": [0.7, 0.8],
    "accuracy_vs_lossless": [-0.01, -0.02, 0.0],
    "tokens_per_round": 5.283,
    "speedup_vs_target": 2.0,
    "speedup_vs_target_ci95": [1.9, 2.1],
    "speedup_vs_lossless": None,
    "speedup_vs_lossless_ci95": None,
}
DOCUMENT = {
    "arms": [ARM],
    "command": "reprieve bench --out runs/tables/frontier",
    "num_problems": 10,
    "num_trials": 1,
    "num_draft_tokens": 8,
    "sampling": {"temperature": 0.0},
    "task": "word_problems",
    "split": "test",
    "dtype": "float32",
    "engine": "local",
    "machine": {"num_threads": 1, "processor": "CPU"},
}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """One table, its stored results and the page that shows it."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n<!-- table frontier -->\nold\n<!-- /table -->\n\n"
        "The margin solves <!-- value frontier ; margin:delta=2 ; accuracy -->?<!-- /value -->.\n"
    )
    (tmp_path / "frontier.json").write_text(json.dumps(DOCUMENT))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    one = {"frontier": {"shown": "arms", "pages": ["page.md"], "run": ["bench --out OUT"], "result": "results.json"}}
    monkeypatch.setattr(tables, "tables", lambda: one)
    tables.kept.cache_clear()
    yield page
    tables.kept.cache_clear()


def test_the_docs_match_the_stored_results():
    assert tables.check() == []


def test_the_real_pairs_heads_are_trained_before_they_are_used():
    makefile = (tables.ROOT / "Makefile").read_text()
    (anywhere,), (on_gpus,) = (
        re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE) for name in ("REAL", "REAL_GPU")
    )
    trained, made = set(), set()
    for name in [*on_gpus.split(), *anywhere.split()]:
        made.add(name)
        for command in tables.tables()[name]["run"]:
            assert set(re.findall(r"runs/tables/([\w-]+)", command)) <= made, name
            assert set(re.findall(r"judge:path=([\w/-]+)", command)) <= trained, name
            trained |= set(re.findall(r"^train judge .*--out (\S+)", command))
    assert len(trained) == 4


def test_a_certificate_shows_its_thresholds_and_the_held_out_problems():
    text = tables.shown("real-certify")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[:2] for row in rows] == [
        ["| 0.5", "1200 (calibration)"], ["| 1", "1200 (calibration)"], ["| 2", "1200 (calibration)"],
        ["| 2", "700 (held out)"],
    ]  # fmt: skip
    assert "`reprieve certify --engine batched" in text and "With 95% confidence, margin:delta=2 loses" in text


def test_writing_a_page_makes_it_match_the_results(made):
    assert len(tables.check()) == 1
    tables.write()
    text = made.read_text()
    assert "| `margin:delta=2` | 75.0 [70.0, 80.0] | -1.0 [-2.0, 0.0] | 5.28 | 2.00 [1.90, 2.10] | - |" in text
    assert "solves <!-- value frontier ; margin:delta=2 ; accuracy -->75.0 [70.0, 80.0]<!-- /value -->." in text
    assert tables.check() == []


@pytest.mark.parametrize(("more", "cell"), [([3.0, 0.5, 5.5], "64, longer"), ([3.0, -0.5, 6.5], "64"), (None, "64")])
def test_answers_that_are_longer_than_the_lossless_ones_are_marked(more, cell):
    document = {**DOCUMENT, "arms": [{**ARM, "tokens_per_answer": 64.2, "tokens_vs_lossless": more}]}
    shown = tables.arms_table({"columns": ["tokens_per_answer"]}, tables.trimmed(document))
    assert f"| {cell} |" in shown and ("`longer`:" in shown) == ("longer" in cell)


def test_changed_and_unsourced_numbers_are_reported(made):
    tables.write()
    text = made.read_text()
    made.write_text(text.replace("75.0 [70.0, 80.0]<!--", "85.0 [70.0, 80.0]<!--") + "\nTwice: 2.03 times, at 45%.\n")
    wrong = tables.check()
    assert len(wrong) == 3
    assert "differs" in wrong[0] and "'2.03'" in wrong[1] and "'45%'" in wrong[2]


def test_results_of_another_command_are_reported(made):
    tables.write()
    tables.tables()["frontier"]["run"] = ["bench --limit 9 --out OUT"]
    assert tables.check() == [
        "frontier: kept is 'reprieve bench --out runs/tables/frontier', tables.yaml has another command"
    ]


def test_code_links_and_cited_lines_may_hold_numbers():
    text = "`margin:delta=0.5`, [a page](docs/3.11.md)\n| paper | 1.04 | <!-- cited -->\n\nversion 0.3.1 of step 12\n"
    assert tables.loose_numbers(text) == []


def test_each_section_of_a_handwritten_page_must_name_a_command(made):
    tables.write()
    page = made.parent / "docs" / "measured" / "tools.md"
    page.parent.mkdir(parents=True)
    server = "## Server\n\n| arm | times |\n| --- | --- |\n| a | 1.9 |\n"
    page.write_text(f"# Tools\n\n## Plugin\n\nHalf as fast: 0.5 [0.4, 0.6].\n\n{server}")
    assert [line.rpartition("under ")[2] for line in tables.check()] == ["'## Plugin'", "'## Server'"]
    page.write_text(page.read_text().replace("\n\n##", "\n\n`reprieve bench`\n\n##") + "\n`benchmarks/x.py`\n")
    assert tables.check() == []


def test_each_trial_in_a_list_must_name_a_command(made):
    text = "# Log\n\n- **One.** -2 [-3, -1] (`reprieve bench`).\n- **Two.** It lost 2 points\n  [1, 3].\n"
    assert tables.unsourced(text, measured=False) == ["- **Two.** It lost 2 points"]


def test_unknown_names_are_refused(made):
    with pytest.raises(ReprieveError, match="no table 'other'"):
        tables.value("other ; margin:delta=2 ; accuracy")
    with pytest.raises(ReprieveError, match="no arm 'top_k:k=2'"):
        tables.value("frontier ; top_k:k=2 ; accuracy")
    for place in ("frontier ; margin:delta=2 ; nope", "frontier"):
        with pytest.raises(ReprieveError, match="NAME ; ARM ; FIELD"):
            tables.value(place)


def test_an_unclosed_marker_is_reported_and_no_text_is_lost(made):
    tables.write()
    text = made.read_text().replace("<!-- /table -->", "") + "\n<!-- table frontier -->\n<!-- /table -->\n"
    made.write_text(text)
    tables.write()
    assert "The margin solves" in made.read_text()
    assert "lacks its opening or its closing marker" in tables.check()[0]


def test_a_failed_command_stores_no_result(made, monkeypatch):
    tables.tables()["frontier"]["run"] = ["bench --limit -1 --out OUT"]
    (made.parent / "frontier.json").unlink()
    old = made.parent / tables.RUNS / "frontier" / "results.json"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps(DOCUMENT))
    monkeypatch.setattr(tables.subprocess, "run", lambda *_, **__: type("Ended", (), {"returncode": 2}))
    with pytest.raises(ReprieveError, match="ended with 2"):
        tables.run(["frontier"])
    assert not (made.parent / "frontier.json").exists()
