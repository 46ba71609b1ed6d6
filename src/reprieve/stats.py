"""Counts and intervals: pure functions of numbers, no models, no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Z95 = 1.959963984540054  # of 95% intervals


def wilson_interval(num_successes: int, num_trials: int) -> tuple[float, float]:
    """95% Wilson score interval of a share; (0, 1) without trials.

    Raises:
        ValueError: successes outside [0, trials].
    """
    if not 0 <= num_successes <= num_trials:
        raise ValueError(f"num_successes must be in [0, {num_trials}], got {num_successes}")
    if num_trials == 0:
        return (0.0, 1.0)
    share = num_successes / num_trials
    spread = Z95 * math.sqrt(share * (1 - share) / num_trials + Z95**2 / (4 * num_trials**2))
    center = share + Z95**2 / (2 * num_trials)
    scale = 1 + Z95**2 / num_trials
    low = 0.0 if num_successes == 0 else (center - spread) / scale
    high = 1.0 if num_successes == num_trials else (center + spread) / scale
    return (low, high)


def paired_difference(
    left: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray
) -> tuple[float, float, float]:
    """Mean of left - right over the same problems, with its 95% interval: (difference, low, high).

    For values of 0 or 1, such as right and wrong answers: the adjusted Wald interval for paired proportions (Bonett and
    Price, 2012). It adds one to the count of each kind of difference, so that few or no differences do not give a
    narrow interval. For other values: a normal interval. For several trials per problem, [n, trials]: a bootstrap over
    problems, since trials of one problem are not independent. If no trial differs, the trials count as one.

    Raises:
        ValueError: different shapes, or no values.
    """
    if np.shape(left) != np.shape(right) or not np.size(left):
        raise ValueError(
            f"paired_difference needs two equally long, non-empty lists, got {np.shape(left)} and {np.shape(right)}"
        )
    differences = np.asarray(left, dtype=float) - np.asarray(right, dtype=float)
    if differences.ndim > 1:
        if differences.shape[1] > 1 and differences.any():
            return (float(differences.mean()), *clustered_interval(differences))
        differences = differences[:, 0]
    mean, num = float(differences.mean()), len(differences)
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        gained, lost = ((int((differences == sign).sum()) + 1) / (num + 2) for sign in (1, -1))
        center, variance = gained - lost, gained + lost - (gained - lost) ** 2
        spread = Z95 * math.sqrt(variance / (num + 2))
        return (mean, max(-1.0, center - spread), min(1.0, center + spread))
    spread = math.inf if num == 1 else Z95 * float(differences.std(ddof=1)) / math.sqrt(num)
    return (mean, mean - spread, mean + spread)


def clustered_interval(values: np.ndarray) -> tuple[float, float]:
    """95% bootstrap interval of the mean of [n, trials], problems resampled with all their trials."""
    by_problem = values.mean(1)
    return bootstrap_interval(lambda index: float(by_problem[index].mean()), len(by_problem))


def share_interval(successes: np.ndarray) -> tuple[float, float]:
    """95% interval of a share, from 0 and 1 in [n, trials]: Wilson for one trial, else bootstrap over problems.

    If all values are equal, the trials of a problem count as one: a bootstrap interval would have zero width.
    """
    if successes.shape[1] == 1 or successes.min() == successes.max():
        return wilson_interval(int(successes[:, 0].sum()), len(successes))
    return clustered_interval(successes.astype(float))


def grouped_interval(values: np.ndarray, problem_ids: Sequence[str]) -> tuple[float, float]:
    """95% interval of the mean of values [n], of which a problem may have several: a bootstrap over problems.

    For successes (booleans) with one per problem, or all equal, Wilson's interval with a trial per problem.
    """
    order = {name: number for number, name in enumerate(dict.fromkeys(problem_ids))}
    of_problem = np.array([order[name] for name in problem_ids])
    counts, sums = np.bincount(of_problem), np.bincount(of_problem, weights=values)
    if values.dtype == bool and (len(order) == len(values) or values.min() == values.max()):
        return wilson_interval(int((sums > 0).sum()), len(order))
    return bootstrap_interval(
        lambda index: float(sums[index].sum() / counts[index].sum()), len(order), num_resamples=1000
    )


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float], num_problems: int, *, seed: int = 0, num_resamples: int = 2000
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
