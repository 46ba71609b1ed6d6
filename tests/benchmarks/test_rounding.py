"""Lossless answers that equal the target's own."""

from __future__ import annotations

import json

import pytest

from reprieve.errors import SpecError
from rounding import rounding_rows
from tests.kit.records import a_record


def a_run(folder, arms, answers, temperature=0.0):
    """Write a run whose problems have one text for each arm, and return its folder."""
    config = {"arms": arms, "num_trials": 1, "sampling": {"temperature": temperature}}
    config |= {"target": "t", "dtype": "int8", "engine": "local"}
    (folder / "run.json").write_text(json.dumps(config))
    records = [
        a_record(arm=arm, problem_id=str(problem), text=text)
        for problem, texts in enumerate(answers)
        for arm, text in zip(arms, texts, strict=True)
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(vars(record)) + "\n" for record in records))
    return folder


def test_each_lossless_arm_is_compared_with_the_target_alone(tmp_path):
    arms = ["target_only", "lossless@K=4", "lossless@K=8", "margin:delta=1"]
    folder = a_run(tmp_path, arms, [("a", "a", "b", "c"), ("d", "d", "d", "d"), ("e", "f", "g", "e")])
    assert rounding_rows("run", folder) == [
        ["run", "t", "int8", "local", "`lossless@K=4`", "2 of 3"],
        ["run", "t", "int8", "local", "`lossless@K=8`", "1 of 3"],
    ]


@pytest.mark.parametrize(
    ("arms", "temperature", "message"),
    [
        (["target_only", "lossless"], 0.5, "must have temperature 0, got 0.5"),
        (["target_only", "margin"], 0.0, "answers of target_only and of a lossless arm"),
        (["lossless", "lossless_rerun"], 0.0, "answers of target_only and of a lossless arm"),
    ],
)
def test_a_run_that_cannot_show_rounding_is_refused(tmp_path, arms, temperature, message):
    with pytest.raises(SpecError, match=message):
        rounding_rows("run", a_run(tmp_path, arms, [("a", "a")], temperature))
