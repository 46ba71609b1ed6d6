"""Risks of a relaxed rule besides lost answers: longer answers and unfinished answers.

Each is a paired difference with a bound, tested like the loss of quality (`bounds.betting_pvalue`), valid at any number
of problems. A threshold is certified if every risk is proved at the same level. The rejected hypothesis is then "at
least one risk is too large". The largest p-value is valid for it, whatever the dependence of the risks (Berger, 1982:
intersection-union tests), so the level is not divided among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reprieve.certify.bounds import betting_pvalue, smallest_proved, upper_bound
from reprieve.certify.settings import Promise

_MOST_GROWTH = 100.0
_PRECISION = 1e-3


@dataclass(frozen=True)
class Lengths:
    """Lengths of the same answers, strict and relaxed.

    Args:
        strict, relaxed: tokens, [n] or [n, trials].
        strict_cut, relaxed_cut: 1 if the answer reached the token budget, else 0; same shapes.
        budget: largest possible length of an answer.
    """

    strict: np.ndarray
    relaxed: np.ndarray
    strict_cut: np.ndarray
    relaxed_cut: np.ndarray
    budget: int


@dataclass(frozen=True)
class RiskTest:
    """Result of a test of one risk on paired lengths.

    Args:
        name: growth (of the mean length, as a share of the strict one) or unfinished (share of answers, beyond strict).
        bound: promised bound.
        upper_bound: the smallest bound that these problems prove.
    """

    name: str
    bound: float
    observed: float
    upper_bound: float
    p_value: float
    passed: bool

    @property
    def contradicted(self) -> bool:
        """True if the observed value reaches the promised bound."""
        return self.observed >= self.bound


def length_risks(promise: Promise, lengths: Lengths) -> tuple[RiskTest, ...]:
    """Test the risks that a promise names."""
    tests = []
    if promise.max_growth is not None:
        tests.append(_growth(promise, lengths, promise.max_growth))
    if promise.max_unfinished is not None:
        tests.append(_unfinished(promise, lengths, promise.max_unfinished))
    return tuple(tests)


def growth_pvalue(promise: Promise, lengths: Lengths, growth: float) -> float:
    """P-value of "the mean relaxed length is (1 + growth) times the mean strict one, or more".

    The mean of relaxed - (1 + growth) * strict is then 0 or more; divided by its largest size it lies in [-1, 1].
    """
    excess = _means(lengths.relaxed) - (1 + growth) * _means(lengths.strict)
    return betting_pvalue(excess / ((1 + growth) * lengths.budget), 0.0, confidence=promise.confidence)


def _growth(promise: Promise, lengths: Lengths, bound: float) -> RiskTest:
    observed = float(lengths.relaxed.mean() / lengths.strict.mean()) - 1 if lengths.strict.any() else 0.0
    p_value = growth_pvalue(promise, lengths, bound)

    def proved(growth: float) -> bool:
        return growth_pvalue(promise, lengths, growth) <= 1 - promise.confidence

    highest = smallest_proved(proved, 0.0, _MOST_GROWTH, precision=_PRECISION)
    return RiskTest("growth", bound, observed, highest, p_value, p_value <= 1 - promise.confidence)


def _unfinished(promise: Promise, lengths: Lengths, bound: float) -> RiskTest:
    more = _means(lengths.relaxed_cut) - _means(lengths.strict_cut)

    def pvalue(values: np.ndarray, at: float) -> float:
        return betting_pvalue(values, at, confidence=promise.confidence)

    p_value = pvalue(more, bound)
    highest = upper_bound(pvalue, more, confidence=promise.confidence, low=-1.0)
    return RiskTest("unfinished", bound, float(more.mean()), highest, p_value, p_value <= 1 - promise.confidence)


def _means(values: np.ndarray) -> np.ndarray:
    """Return the mean of each problem over its trials: [n] or [n, trials] to [n]."""
    means: np.ndarray = np.asarray(values, dtype=float).reshape(len(values), -1).mean(1)
    return means
