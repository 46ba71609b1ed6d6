"""Running mean with an interval that is valid at every time, for monitors that are read continuously."""

from __future__ import annotations

import math

import numpy as np

from reprieve.errors import require_range

_NUM_BETS = 24


class ConfidenceSequence:
    """Mean drop so far, with an interval that covers the true mean at all times at once with the given confidence.

    For every candidate mean on a grid, gamblers bet on both sides of it with constant bets of different sizes. A
    candidate is excluded once their mean capital reaches 1 / (1 - confidence). By Ville's inequality, the true mean is
    ever excluded with at most that probability, however often one looks (Waudby-Smith and Ramdas, arXiv 2010.09686,
    section 4). Problems must come in random order, as randomly selected requests do.

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
