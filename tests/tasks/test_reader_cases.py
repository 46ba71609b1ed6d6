"""Answers as people and models write them, by kind: each is read correctly or not at all."""

import json
from pathlib import Path

import pytest

from reprieve.tasks.graders import GRADERS
from reprieve.tasks.table import JsonlTask

CASES = json.loads((Path(__file__).parent / "reader_cases.json").read_text())
OF_ANSWERS = [case for case in CASES if "mode" not in case]


@pytest.mark.parametrize("case", OF_ANSWERS, ids=lambda case: f"{case['kind']}: {case['input'][:40]!r}")
def test_an_answer_is_read_correctly(case):
    grader = GRADERS.make(case["grader"])
    if case["grader"] == "math":
        assert grader.equivalent(case["input"], case["other"]) is case["right"]
        assert grader.equivalent(case["other"], case["input"]) is case["right"]
        return
    answer = grader.extract(case["input"])
    if case["right"] is None or case["grader"] == "choice":
        assert answer == case["right"]
    else:
        assert grader.equivalent(answer, case["right"]), answer


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.get("mode") == "reference"], ids=lambda case: repr(case["input"])
)
def test_a_reference_is_read_correctly(case, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": case["input"]}) + "\n")
    (problem,) = JsonlTask(path=str(path), grader=case["grader"]).problems("all", 1)
    assert GRADERS.make(case["grader"]).equivalent(problem.reference, case["right"]), problem.reference
