"""Problems solved, split by the style of an answer and by its first token."""

from __future__ import annotations

import json

import pytest

from reprieve.errors import SpecError
from styles import arms_of, first_token_rows, shared, style_rows
from tests.kit.records import a_record

ANSWERS = {  # by problem: lossless decoding's text and result, the rule's
    "p1": ("print(7)", False, "7", True),
    "p2": ("print(8)", True, "print(8)", True),
    "p3": ("So print(9)", False, "9", False),
    "p4": ("4", True, "5", False),
}


@pytest.fixture
def folder(tmp_path):
    arms = ["lossless", "margin:delta=1"]
    (tmp_path / "run.json").write_text(json.dumps({"arms": arms, "num_trials": 1}))
    lines = []
    for problem, answers in ANSWERS.items():
        for arm, text, correct in zip(arms, answers[::2], answers[1::2], strict=True):
            record = a_record(arm=arm, problem_id=problem, text=text, correct=correct)
            lines.append(json.dumps(vars(record)) + "\n")
    (tmp_path / "problems.jsonl").write_text("".join(lines))
    return tmp_path


def test_solved_problems_are_split_by_the_style_of_the_lossless_answer(folder):
    arms = arms_of(folder)
    assert style_rows("a", arms, "print(") == [
        ["a", "`print(`", "`lossless`", 3, "1 of 3", "1 of 1"],
        ["a", "`print(`", "`margin:delta=1`", 1, "2 of 3", "0 of 1"],
    ]
    assert [row[3:] for row in style_rows("a", arms, "^print(")] == [[2, "1 of 2", "1 of 2"], [1, "2 of 2", "0 of 2"]]


def test_solved_problems_are_split_by_whether_the_first_token_was_rescued(folder):
    assert first_token_rows("a", arms_of(folder)) == []
    lines = (folder / "problems.jsonl").read_text().splitlines()
    spans = {"p1": [[1, "r"]], "p2": [[7, "m"], [1, "r"]], "p3": [], "p4": [[1, "r"]]}
    records = [json.loads(line) for line in lines]
    for record in records:
        record["spans"] = spans[record["problem_id"]] if record["arm"] != "lossless" else [[1, "t"]]
    (folder / "problems.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = first_token_rows("a", arms_of(folder))
    assert rows == [["a", "`margin:delta=1`", "1 of 2", "1 of 2", "1 of 2", "1 of 2"]]


def test_runs_are_compared_on_the_problems_that_all_of_them_have(folder):
    arms = arms_of(folder)
    fewer = {arm: records[1:] for arm, records in arms.items()}
    kept = shared({"a": arms, "b": fewer})
    assert kept == {"a": fewer, "b": fewer} and len(fewer["lossless"]) == 3


def test_a_run_without_lossless_answers_is_refused(folder):
    (folder / "problems.jsonl").write_text("")
    with pytest.raises(SpecError, match="holds no finished answers of lossless"):
        arms_of(folder)
