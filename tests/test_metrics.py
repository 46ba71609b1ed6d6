"""Intervals and differences."""

from __future__ import annotations

import numpy as np
import pytest

from reprieve.metrics import bootstrap_interval, paired_difference, wilson_interval


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
    assert high - low < 0.06, "agreeing problems add no noise"
    with pytest.raises(ValueError, match=r"got \(1,\) and \(2,\)"):
        paired_difference([True], [True, False])


def test_bootstrap_interval_covers_the_mean():
    values = np.random.default_rng(0).normal(5.0, 1.0, 400)
    low, high = bootstrap_interval(lambda index: float(values[index].mean()), 400)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)
