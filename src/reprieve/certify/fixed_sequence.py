"""Certified leniency: the most lenient threshold whose loss is proved to be below what was asked for.

Thresholds are tried from strict to lenient, each with a valid test, until the first failure (Learn-then-Test with
fixed-sequence testing, arXiv 2110.01052): whatever the loss does as thresholds loosen, the chance that any threshold
passed whose true loss is at or above the bound is at most 1 - confidence. No correction for their number is needed,
since the order is fixed beforehand and the walk ends at the first failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from reprieve.certify.bounds import betting_pvalue, hoeffding_bentkus_pvalue, upper_bound
from reprieve.certify.settings import NET_DROP, Promise
from reprieve.errors import SpecError


def losses_of(promise: Promise, strict: np.ndarray, relaxed: np.ndarray) -> np.ndarray:
    """Loss of each problem, from how it was solved: [n] or [n, trials] in [0, 1] to [n]."""
    losses = strict - relaxed if promise.loss == NET_DROP else strict * (1 - relaxed)
    means: np.ndarray = np.asarray(losses, dtype=float).reshape(len(losses), -1).mean(1)
    return means


def pvalue(promise: Promise, losses: np.ndarray, bound: float) -> float:
    """Of "the loss is `bound` or more"."""
    if promise.loss == NET_DROP:
        return betting_pvalue(losses, bound, confidence=promise.confidence)
    return hoeffding_bentkus_pvalue(losses, bound)


def num_needed(promise: Promise) -> int:
    """Return how many problems prove a promise where the relaxed rule loses nothing on any of them."""
    low, high = 0, 1
    while pvalue(promise, np.zeros(high), promise.max_drop) > 1 - promise.confidence:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        proved = pvalue(promise, np.zeros(middle), promise.max_drop) <= 1 - promise.confidence
        low, high = (low, middle) if proved else (middle, high)
    return high


def paired_test(promise: Promise, strict: np.ndarray, relaxed: np.ndarray) -> PairedTest:
    """Whether these paired outcomes prove the promise.

    Raises:
        ValueError: different shapes, or none.
    """
    if strict.shape != relaxed.shape or not len(strict):
        raise ValueError(f"outcomes must be of the same problems, got shapes {strict.shape} and {relaxed.shape}")
    losses = losses_of(promise, strict, relaxed)
    p_value = pvalue(promise, losses, promise.max_drop)
    return PairedTest(
        num_problems=len(losses),
        accuracy_strict=float(strict.mean()),
        accuracy_relaxed=float(relaxed.mean()),
        regressions=float((strict * (1 - relaxed)).mean()),
        improvements=float((relaxed * (1 - strict)).mean()),
        observed=float(losses.mean()),
        upper_bound=upper_bound(
            partial(pvalue, promise),
            losses,
            confidence=promise.confidence,
            low=-1.0 if promise.loss == NET_DROP else 0.0,
        ),
        p_value=p_value,
        passed=p_value <= 1 - promise.confidence,
    )


@dataclass(frozen=True)
class PairedTest:
    """What paired outcomes say, in shares of problems.

    `upper_bound` holds with the promise's confidence for one threshold looked at alone; what holds for the threshold
    that a walk ends at is the promise, `max_drop`.
    """

    num_problems: int
    accuracy_strict: float
    accuracy_relaxed: float
    regressions: float  # solved strictly, failed relaxed
    improvements: float  # the other way round
    observed: float  # the loss
    upper_bound: float
    p_value: float  # of "the loss is max_drop or more"
    passed: bool


@dataclass(frozen=True)
class ThresholdStep:
    """One threshold of the walk."""

    threshold: float
    evidence: PairedTest
    tokens_per_round: float | None = None


def walk(
    thresholds: Sequence[float],
    promise: Promise,
    measure: Callable[[float], tuple[np.ndarray, np.ndarray, float | None]],
    *,
    on_step: Callable[[ThresholdStep], None] = lambda step: None,
) -> list[ThresholdStep]:
    """Test thresholds in the given order, from strict to lenient, up to and including the first that fails.

    The last step that passed is the one to use; none passed where the first step failed.

    Args:
        measure: from a threshold to strict and relaxed outcomes of the same problems, [n] or [n, trials] in [0, 1],
            and tokens a round.

    Raises:
        SpecError: no thresholds, or one twice.
    """
    if not thresholds or len(set(thresholds)) != len(thresholds):
        raise SpecError(f"thresholds must be different values, at least one, got {list(thresholds)}")
    steps: list[ThresholdStep] = []
    for threshold in thresholds:
        strict, relaxed, tokens_per_round = measure(threshold)
        steps.append(ThresholdStep(threshold, paired_test(promise, strict, relaxed), tokens_per_round))
        on_step(steps[-1])
        if not steps[-1].evidence.passed:
            break
    return steps
