"""Valid one-sided tests of the loss of quality, the largest loss they leave possible, and a running interval.

The loss compares strict and relaxed answers to the same problems: strict minus relaxed, in [-1, 1] per problem. A
p-value tests the hypothesis that the mean loss is `bound` or more. No test needs large samples or normality.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from reprieve.errors import require_range

_PRECISION = 1e-5
_LARGEST_BET = 0.9  # share of the largest bet that keeps the capital positive
_NUM_BETS = 24  # of a confidence sequence, on each side


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
    if not len(drops) or np.abs(drops).max() > 1:
        got = f"[{drops.min():g}, {drops.max():g}]" if len(drops) else "none"
        raise ValueError(f"drops must be in [-1, 1], at least one, got {got}")
    require_range("bound", bound, -0.999999, 0.999999)
    shuffled = drops[np.random.default_rng(len(drops)).permutation(len(drops))]
    return float(min(1.0, math.exp(-_log_capital((shuffled + 1) / 2, (bound + 1) / 2, confidence))))


def upper_bound(pvalue: Callable[[float], float], low: float, high: float, *, confidence: float) -> float:
    """Return the smallest bound that a test accepts at `confidence`: the true loss is below it, with that confidence.

    Args:
        pvalue: p-value of each bound; it falls as the bound grows.
        low: the smallest possible loss.
        high: the largest possible loss; the result if no bound is accepted.
    """
    while high - low > _PRECISION * max(1.0, high):
        middle = (low + high) / 2
        low, high = (low, middle) if pvalue(middle) <= 1 - confidence else (middle, high)
    return high


class ConfidenceSequence:
    """Mean drop so far, with an interval that covers the true mean at all times at once with the given confidence.

    For every candidate mean on a grid, gamblers bet on both sides of it with constant bets of different sizes. A
    candidate is excluded once their mean capital reaches 1 / (1 - confidence). By Ville's inequality, the true mean is
    ever excluded with at most that probability, however often one looks (Waudby-Smith and Ramdas, arXiv 2010.09686,
    section 4). Problems must come in random order.

    Args:
        confidence: in [0.5, 1).
        resolution: step of the grid, in drop.
    """

    def __init__(self, *, confidence: float = 0.95, resolution: float = 0.002) -> None:
        require_range("confidence", confidence, 0.5, 0.999999)
        require_range("resolution", resolution, 1e-5, 0.1)
        self.confidence = confidence
        self.num = 0
        self._sum = 0.0
        self._grid = np.linspace(-1, 1, round(2 / resolution) + 1)
        means = (self._grid + 1) / 2
        shares = np.geomspace(0.01, 0.95, _NUM_BETS)[:, None]
        # Bets that the mean is smaller, then that it is larger; all keep the capital positive.
        self._bets = np.concatenate(
            [shares / np.maximum(1 - means, 1e-9), -shares / np.maximum(means, 1e-9)]
        )  # [2 * bets, grid]
        self._means = means
        self._log_capital = np.zeros_like(self._bets)
        self._inside = np.ones(len(means), dtype=bool)

    @property
    def mean(self) -> float:
        return self._sum / self.num if self.num else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end; (-1, 1) before the first value."""
        kept = self._grid[self._inside]
        step = float(self._grid[1] - self._grid[0])  # the true mean can lie between candidates
        low, high = (kept[0], kept[-1]) if len(kept) else (self.mean, self.mean)
        return (max(-1.0, float(low) - step), min(1.0, float(high) + step))

    def update(self, drop: float) -> None:
        """Add one drop, in [-1, 1].

        Raises:
            SpecError: a value outside.
        """
        require_range("drop", drop, -1.0, 1.0)
        self.num += 1
        self._sum += drop
        value = (drop + 1) / 2
        self._log_capital += np.log1p(self._bets * (self._means - value))
        top = self._log_capital.max(0)
        capital = top + np.log(np.exp(self._log_capital - top).mean(0))
        self._inside &= capital < math.log(1 / (1 - self.confidence))


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
