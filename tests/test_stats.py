"""Intervals and differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reprieve.stats import bootstrap_interval, paired_difference, share_interval, wilson_interval


def test_wilson_interval_by_hand():
    low, high = wilson_interval(9, 10)
    assert (low, high) == (pytest.approx(0.5958, abs=1e-4), pytest.approx(0.9821, abs=1e-4))
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"\[0, 3\], got 4"):
        wilson_interval(4, 3)


def test_paired_difference_counts_only_discordant_problems():
    left, right = [True] * 50 + [False] * 50, [True] * 48 + [False] * 52
    mean, low, high = paired_difference(left, right)
    assert mean == pytest.approx(0.02)
    width = 2 * 1.959964 * math.sqrt((3 / 102 + 1 / 102 - (2 / 102) ** 2) / 102)
    assert high - low == pytest.approx(width), "agreeing problems add no noise: as if unpaired it would be 0.28"
    with pytest.raises(ValueError, match=r"got \(1,\) and \(2,\)"):
        paired_difference([True], [True, False])


def test_paired_shares_by_hand():
    # Bonett and Price's adjusted Wald interval: 3 gained, 1 lost of 18 problems.
    left, right = [1.0] * 3 + [0.0] + [1.0] * 14, [0.0] * 3 + [1.0] + [1.0] * 14
    mean, low, high = paired_difference(left, right)
    assert mean == pytest.approx(2 / 18)
    spread = 1.959964 * math.sqrt((4 / 20 + 2 / 20 - (2 / 20) ** 2) / 20)
    assert (low, high) == (pytest.approx(0.1 - spread), pytest.approx(0.1 + spread))


@pytest.mark.parametrize("num", [60, 1000])
def test_more_differences_widen_the_interval_of_paired_shares(num):
    widths = []
    for discordant in (0, 1, 2):
        _, low, high = paired_difference([1.0] * discordant + [0.0] * (num - discordant), [0.0] * num)
        assert -1 <= low <= discordant / num <= high <= 1
        widths.append(high - low)
    assert widths == sorted(widths)


def test_the_interval_of_paired_shares_has_its_nominal_coverage():
    rng = np.random.default_rng(0)
    for gained, lost in ((0.02, 0.02), (0.0, 0.01), (0.05, 0.01)):
        shares = rng.multinomial(200, [gained, lost, 1 - gained - lost], size=2000)
        covered = 0
        for more, less, _ in shares:
            differences = [1.0] * more + [-1.0] * less + [0.0] * (200 - more - less)
            _, low, high = paired_difference(np.maximum(differences, 0), np.maximum(np.negative(differences), 0))
            covered += low <= gained - lost <= high
        assert covered / 2000 > 0.94


def test_trials_that_are_all_the_same_count_as_one():
    same = np.ones((2, 3))
    assert paired_difference(same, same) == paired_difference(same[:, 0], same[:, 0])
    assert share_interval(same) == wilson_interval(2, 2)


def test_other_values_give_a_normal_interval():
    mean, _, high = paired_difference([3.0, 5.0, 7.0], [1.0, 1.0, 1.0])
    assert (mean, high - mean) == (4.0, pytest.approx(1.959964 * 2 / math.sqrt(3)))
    assert paired_difference([3.0], [1.0])[1:] == (-math.inf, math.inf)


def test_bootstrap_interval_covers_the_mean():
    values = np.random.default_rng(0).normal(5.0, 1.0, 400)
    low, high = bootstrap_interval(lambda index: float(values[index].mean()), 400)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)
