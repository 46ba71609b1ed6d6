"""Losses that a run can prove about its rules."""

from __future__ import annotations

import numpy as np
import pytest

from provable import num_needed, rows_of
from reprieve.bench.arms import make_arms
from reprieve.bench.settings import Promise
from reprieve.errors import SpecError
from reprieve.settings import PromptSettings
from tests.bench.toys import run

PROMISE = Promise(0.03, max_growth=0.1, max_unfinished=0.01)


def test_more_problems_are_needed_as_the_loss_grows_until_none_suffice():
    nothing, some = np.zeros(100), np.repeat([1.0, 0.0], [1, 99])
    assert num_needed(PROMISE, nothing) < num_needed(PROMISE, some)
    assert num_needed(PROMISE, np.repeat([1.0, 0.0], [3, 97])) is None


def test_a_run_has_a_row_for_each_rule(pair, tmp_path):
    arms = make_arms(["random:rate=0.5", "margin:delta=1"], [4])
    run(pair, arms, tmp_path / "toy", prompt=PromptSettings(max_new_tokens=40))
    rows = rows_of(tmp_path / "toy", PROMISE)
    assert [row[:3] for row in rows] == [["toy", "`random:rate=0.5`", 6], ["toy", "`margin:delta=1`", 6]]
    (tmp_path / "toy" / "problems.jsonl").write_text("")
    with pytest.raises(SpecError, match="holds no finished answers of lossless"):
        rows_of(tmp_path / "toy", PROMISE)
