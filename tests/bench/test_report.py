"""The report: one file, no network, true numbers, safe text."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from reprieve.bench import figures
from reprieve.bench.arms import make_arms
from reprieve.bench.report import write_report
from reprieve.bench.summary import summarise
from reprieve.cli.main import main
from reprieve.errors import ReprieveError
from reprieve.rules.margin import MarginRule
from tests.bench.toys import run
from tests.certify.test_fixed_sequence import certificate
from tests.kit.results import throughput_results


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    arms = make_arms(["margin:delta=3", "random:rate=0.6", "direct:top_k:k=2"], [4])
    summarise(run(pair, arms, path, limit=20)).write(path)
    (path / "margin-net_drop-0.02.json").write_text(
        certificate(
            MarginRule(),
            calibration={
                "split": "validation",
                "offset": 0,
                "steps": [{"threshold": 0.1, "tokens_per_round": 4.2, "evidence": EVIDENCE}],
            },
            held_out={"split": "test", "offset": 0, "tokens_per_round": None, **EVIDENCE},
            made_with={"command": "reprieve certify --rule margin"},
        ).to_json()
    )
    return path


EVIDENCE = {
    "num_problems": 1000, "accuracy_strict": 0.9, "accuracy_relaxed": 0.89, "regressions": 0.02, "improvements": 0.01,
    "observed": 0.01, "upper_bound": 0.019, "p_value": 0.03, "passed": True,
}  # fmt: skip


class Page(HTMLParser):
    """Collect the URLs that a browser would fetch, and check that tags close."""

    VOID = {"meta", "br", "line", "rect", "path", "polyline", "circle", "link", "img"}

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_self_contained_and_complete(folder, tmp_path):
    path = write_report([folder], tmp_path / "r.html", title="A <b>title</b>")
    content = path.read_text()
    page = Page()
    page.feed(content)
    assert page.open == [] and page.fetched == [] and "@import" not in content
    assert not re.findall(r"url\((?!#)", content) and "<script" not in content
    assert not re.findall(r"https?://(?!www\.w3\.org/(2000/svg|1999/xlink))", content)
    told = " ".join(" ".join(page.text).split())
    for words in (
        "A <b>title</b>", "Certificates", "It holds.", "Quality against speed",
        "Rescued tokens in context", "Reproduce", "20 problems",
        "reprieve certify", "random:rate=0.6",
    ):  # fmt: skip
        assert words in told, words
    document = json.loads((folder / "results.json").read_text())
    row = next(arm for arm in document["arms"] if arm["spec"] == "margin:delta=3")
    assert f"{100 * row['accuracy']:.1f}%" in content and ">margin</text>" in content


def test_examples_show_the_whole_answer_and_mark_rescues(folder, tmp_path):
    content = write_report([folder], tmp_path / "r.html").read_text()
    records = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    shown = re.findall(r'<div class="answer">(.*?)</div>', content, re.DOTALL)
    assert shown and any('class="r"' in answer for answer in shown)
    texts = {record["text"].strip() for record in records}
    for answer in shown:
        assert re.sub(r"<[^>]*>", "", answer).strip() in texts


def test_model_output_is_escaped(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("results.json", "problems.jsonl"):
        (copy / name).write_text((folder / name).read_text())
    lines = []
    for line in (copy / "problems.jsonl").read_text().splitlines():
        record = json.loads(line)
        text = "<script>alert(1)</script>"
        lines.append(json.dumps({**record, "text": text, "spans": [[len(text), "r"]], "correct": True}))
    (copy / "problems.jsonl").write_text("\n".join(lines) + "\n")
    content = write_report([copy], tmp_path / "r.html").read_text()
    assert "<script>alert" not in content and "&lt;script&gt;alert" in content


def test_ungraded_and_interrupted_runs_are_reported_too(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    document = json.loads((folder / "results.json").read_text())
    quality = ("accuracy", "accuracy_ci95", "accuracy_vs_lossless", "regression_rate", "regression_rate_ci95")
    for arm in document["arms"]:
        arm.update(dict.fromkeys([*quality, "seconds_per_solved", "accuracy_vs_target"]))
    document.update(graded=False, complete=False)
    (copy / "results.json").write_text(json.dumps(document))
    (copy / "problems.jsonl").write_text((folder / "problems.jsonl").read_text())
    content = write_report([copy], tmp_path / "r.html").read_text()
    assert "Quality against speed" not in content and "The run was interrupted" in content


def test_folders_without_results_are_refused(folder, tmp_path, capsys):
    with pytest.raises(ReprieveError, match="neither a run"):
        write_report([tmp_path], tmp_path / "r.html")
    results = json.loads((folder / "results.json").read_text())
    for damaged, message in (
        ([], "must be an object of schema 2"),
        ({"schema": 1}, "must be an object of schema 2"),
        ({"schema": 2}, "config is missing"),
        ({**results, "arms": []}, "has no arms"),
        ({**results, "arms": [{**results["arms"][0], "accuracy": "all"}]}, "accuracy must be of type float"),
    ):
        (tmp_path / "results.json").write_text(json.dumps(damaged))
        with pytest.raises(ReprieveError, match=message):
            write_report([tmp_path], tmp_path / "r.html")
    (tmp_path / "results.json").write_text(json.dumps(results))
    for damaged in ([], {}):
        (tmp_path / "judged.json").write_text(json.dumps(damaged))
        with pytest.raises(ReprieveError, match=r"judged.json' must be an object of schema 1"):
            write_report([tmp_path], tmp_path / "r.html")
    (tmp_path / "results.json").unlink()
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "r.html")]) == 1
    assert "neither a run" in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "r.html")]) == 0


def test_figures_are_reproducible():
    row = throughput_results("a", concurrency=1, tokens_per_second=10.0, tokens_per_second_range=[9.0, 12.0])
    names = {"a": 'told "so" <b>'}

    def drawn():
        return figures.as_svg(figures.throughput([row, dataclasses.replace(row, concurrency=8)], names))

    assert drawn() == drawn() and "&lt;b&gt;" in drawn() and "<b>" not in drawn()


@pytest.mark.parametrize(("commit", "dirty"), [("abc123-dirty", True), ("abc123", False), (None, False)])
def test_the_page_reports_uncommitted_changes(folder, tmp_path, commit, dirty):
    for path in folder.glob("*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    document = json.loads((folder / "results.json").read_text())
    document["environment"]["commit"] = commit
    (tmp_path / "results.json").write_text(json.dumps(document))
    page = write_report([tmp_path], tmp_path / "r.html").read_text()
    assert ("with changes that are in no commit" in page) == dirty and "abc123-dirty" not in page
    assert ("Commit abc123" if commit else "Commit unknown") in page
