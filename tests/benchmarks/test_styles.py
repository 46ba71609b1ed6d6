"""Counts of answers in a style, and of the problems solved with and without it."""

from __future__ import annotations

import json

import pytest

from reprieve.errors import SpecError
from styles import rows_of
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
    name = f"{folder.parent.name}/{folder.name}"
    assert rows_of(folder, "print(") == [
        [name, "`print(`", "`lossless`", 3, "1 of 3", "1 of 1"],
        [name, "`print(`", "`margin:delta=1`", 1, "2 of 3", "0 of 1"],
    ]
    assert [row[3:] for row in rows_of(folder, "^print(")] == [[2, "1 of 2", "1 of 2"], [1, "2 of 2", "0 of 2"]]


def test_a_run_without_lossless_answers_is_refused(folder):
    (folder / "problems.jsonl").write_text("")
    with pytest.raises(SpecError, match="holds no finished answers of lossless"):
        rows_of(folder, "print(")
