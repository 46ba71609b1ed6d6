"""Trials, differences and their tests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reprieve.bench.arms import make_arms
from reprieve.bench.summary import _against_allocation, summarise
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.settings import SamplingSettings
from reprieve.stats import clustered_interval, paired_difference
from tests.bench.toys import run
from tests.kit.records import a_record


def test_trials_are_sampled_independently_and_count_as_one_problem(pair, tmp_path):
    arms = make_arms(["margin:delta=2"], [4])
    whole = run(pair, arms, tmp_path, num_trials=3, sampling=SamplingSettings(temperature=1.0))
    ours = [r for r in whole.records if r.arm == "margin:delta=2" and r.problem_id == "p0"]
    assert [record.trial for record in ours] == [0, 1, 2] and len({record.text for record in ours}) > 1
    results = summarise(whole)
    assert (results.num_problems, results.config.num_trials, results.num_answers) == (6, 3, 18)
    assert results.arms[-1].accuracy == np.mean([r.correct for r in whole.records if r.arm == "margin:delta=2"])
    again = run(pair, arms, tmp_path, num_trials=3, sampling=SamplingSettings(temperature=1.0))
    assert len(again.records) == len(whole.records), "nothing is answered twice"


def test_regressions_and_improvements_make_the_net_drop(pair, tmp_path):
    arms = summarise(run(pair, make_arms(["random:rate=0.9"], [4]), tmp_path, limit=20)).arms
    arm, lossless = arms[-1], next(one for one in arms if one.rule == "lossless")
    assert arm.net_drop[0] == pytest.approx(arm.regression_rate - arm.improvement_rate)
    assert arm.net_drop[0] == pytest.approx(-arm.accuracy_vs_lossless[0])
    assert arm.truncated_vs_lossless[0] == 0
    difference, low, high = arm.tokens_vs_lossless
    assert low <= difference <= high
    assert difference == pytest.approx(arm.tokens_per_answer - lossless.tokens_per_answer)


def test_correlated_trials_do_not_narrow_an_interval():
    rng = np.random.default_rng(0)
    problems = rng.integers(0, 2, (60, 1)).astype(float)
    repeated = np.repeat(problems, 5, axis=1)
    low, high = clustered_interval(repeated)
    independent = np.std(repeated) / math.sqrt(repeated.size) * 2 * 1.96
    assert high - low > 1.8 * independent
    assert paired_difference(repeated, np.zeros_like(repeated))[0] == pytest.approx(problems.mean())


def test_random_allocation_is_compared_at_the_arms_speed():
    def row(correct, seconds):
        return [[a_record(correct=correct, seconds=seconds)]]

    # The target is right and slow, the draft wrong and fast: with a third of the problems it gives a 1.5x speedup.
    target, draft, arm = row(True, 10.0) * 90, row(False, 0.0) * 90, row(True, 20 / 3) * 90
    difference, low, high = _against_allocation("arm", {TARGET_ONLY: target, DRAFT_ONLY: draft, "arm": arm})
    assert difference == pytest.approx(1 / 3) and low <= difference <= high
