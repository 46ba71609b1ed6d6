"""Counts and intervals: pure functions of numbers, no models, no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Z95 = 1.959963984540054


def wilson_interval(num_successes: int, num_trials: int, *, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a share, 95% by default; (0, 1) without trials.

    Raises:
        ValueError: successes outside [0, trials].
    """
    if not 0 <= num_successes <= num_trials:
        raise ValueError(f"num_successes must be in [0, {num_trials}], got {num_successes}")
    if num_trials == 0:
        return (0.0, 1.0)
    share = num_successes / num_trials
    spread = z * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2))
    center = share + z * z / (2 * num_trials)
    scale = 1 + z * z / num_trials
    low = 0.0 if num_successes == 0 else (center - spread) / scale
    high = 1.0 if num_successes == num_trials else (center + spread) / scale
    return (low, high)


def paired_difference(left: Sequence[bool], right: Sequence[bool], *, z: float = Z95) -> tuple[float, float, float]:
    """Mean of left - right over the same problems, with its normal 95% interval: (difference, low, high).

    Raises:
        ValueError: different lengths, or none.
    """
    if len(left) != len(right) or not left:
        raise ValueError(f"paired_difference needs two equally long, non-empty lists, got {len(left)} and {len(right)}")
    differences = np.asarray(left, dtype=float) - np.asarray(right, dtype=float)
    mean = float(differences.mean())
    spread = z * float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else 1.0
    return (mean, mean - spread, mean + spread)


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float],
    num_problems: int,
    *,
    seed: int = 0,
    num_resamples: int = 2000,
) -> tuple[float, float]:
    """95% percentile bootstrap over problems.

    Args:
        statistic: from indices [num_problems] (problems, drawn with replacement) to the number of interest; NaN where
            a resample does not define it.
    """
    rng = np.random.default_rng(seed)
    draws = [statistic(rng.integers(0, num_problems, num_problems)) for _ in range(num_resamples)]
    if np.isnan(draws).all():
        return (math.nan, math.nan)
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return (float(low), float(high))
