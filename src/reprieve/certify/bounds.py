"""Valid one-sided tests of the loss of quality, and the largest loss they leave possible.

Both losses compare strict and relaxed answers to the same problems: the *regression rate* (solved strictly, failed
relaxed; in [0, 1] per problem) and the *net drop* (strict minus relaxed; in [-1, 1] per problem). Every p-value tests
the hypothesis that the loss is `bound` or more. No test needs large samples or normality.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from reprieve.errors import import_extra, require_range

_PRECISION = 1e-5
_LARGEST_BET = 0.9  # share of the largest bet that keeps the capital positive


def hoeffding_bentkus_pvalue(losses: np.ndarray, bound: float) -> float:
    """P-value of "the mean loss is `bound` or more", for losses in [0, 1], [n].

    The smaller of Hoeffding's bound, in its tighter form, and Bentkus' (Bates et al., arXiv 2101.02703, Theorem 3, used
    by Learn-then-Test, arXiv 2110.01052). If every loss is 0 or 1, Bentkus' bound without its factor e is the exact
    binomial test.

    Raises:
        SpecError: a bound outside (0, 1].
        ValueError: no losses, or losses outside [0, 1].
    """
    require_range("bound", bound, 0.0, 1.0, low_open=True)
    _require_within(losses, 0.0)
    num, mean = len(losses), float(losses.mean())
    if mean >= bound:
        return 1.0
    binom = import_extra("scipy.stats", "evidence").binom
    hoeffding = math.exp(-num * _divergence(mean, bound))
    binary = bool(np.isin(losses, (0.0, 1.0)).all())
    # Rounding of sums such as 0.1 + 0.2 must not raise the ceiling by one.
    bentkus = (1.0 if binary else math.e) * float(binom.cdf(math.ceil(num * mean - 1e-9), num, bound))
    return min(hoeffding, bentkus, 1.0)


def betting_pvalue(drops: np.ndarray, bound: float, *, confidence: float = 0.95) -> float:
    """P-value of "the mean drop is `bound` or more", for drops in [-1, 1], [n], in any order.

    The inverse of the capital of a gambler who bets against that hypothesis, each bet chosen from the earlier drops
    (Waudby-Smith and Ramdas, arXiv 2010.09686). Under the hypothesis, and with problems in random order, the capital is
    a supermartingale, so it reaches 1 / p with probability at most p. Data sets are often ordered, by topic or
    difficulty, so the drops are shuffled first, always in the same way. Bets are sized for n problems and `confidence`;
    any other size is valid too, but weaker.

    Raises:
        SpecError: a bound outside (-1, 1), or a confidence outside (0, 1).
        ValueError: no drops, or drops outside [-1, 1].
    """
    require_range("confidence", confidence, 0.5, 0.999999)
    _require_within(drops, -1.0)
    require_range("bound", bound, -0.999999, 0.999999)
    shuffled = drops[np.random.default_rng(len(drops)).permutation(len(drops))]
    return float(min(1.0, math.exp(-_log_capital((shuffled + 1) / 2, (bound + 1) / 2, confidence))))


def upper_bound(
    pvalue: Callable[[np.ndarray, float], float], losses: np.ndarray, *, confidence: float, low: float
) -> float:
    """Return the smallest bound that a test accepts at `confidence`: the true loss is below it, with that confidence.

    Args:
        pvalue: a test whose p-value falls as the bound grows.
        low: the smallest possible loss: 0 for regressions, -1 for drops.
    """
    high, alpha = 1.0 - 1e-6, 1 - confidence
    if pvalue(losses, high) > alpha:
        return 1.0
    return smallest_proved(lambda bound: pvalue(losses, bound) <= alpha, low + 1e-6, high, precision=_PRECISION)


def smallest_proved(proved: Callable[[float], bool], low: float, high: float, *, precision: float) -> float:
    """Return the smallest bound from `low` to `high` that is proved together with all larger ones; `high` if none is.

    Args:
        precision: of the result; relative where it is above 1.
    """
    while high - low > precision * max(1.0, high):
        middle = (low + high) / 2
        low, high = (low, middle) if proved(middle) else (middle, high)
    return high


def _log_capital(values: np.ndarray, mean: float, confidence: float) -> float:
    """Return the log of the capital after betting that `values` in [0, 1] have a smaller mean than `mean`."""
    before = np.arange(len(values))
    squares = np.concatenate([[0.0], np.cumsum((values - _running(values)) ** 2)[:-1]])
    variance = (0.25 + squares) / (before + 1)
    bets = np.sqrt(2 * math.log(1 / (1 - confidence)) / (len(values) * variance))
    bets = np.minimum(bets, _LARGEST_BET / (1 - mean))
    return float(np.log1p(bets * (mean - values)).sum())


def _running(values: np.ndarray) -> np.ndarray:
    """Return the running mean at each index, itself included, shrunk towards 1/2 by one observation."""
    return (0.5 + np.cumsum(values)) / (2 + np.arange(len(values)))


def _divergence(mean: float, bound: float) -> float:
    """Return the KL divergence of two Bernoulli distributions, nats; infinite if `bound` is 1."""
    if bound >= 1.0:
        return math.inf
    first = mean * math.log(mean / bound) if mean > 0 else 0.0
    return first + (1 - mean) * math.log((1 - mean) / (1 - bound))


def _require_within(values: np.ndarray, low: float) -> None:
    if not len(values) or values.min() < low or values.max() > 1:
        got = f"[{values.min():g}, {values.max():g}]" if len(values) else "none"
        raise ValueError(f"values must be in [{low:g}, 1], at least one, got {got}")
