"""Certified leniency: the most lenient threshold whose loss is proved to be below a bound.

Thresholds are tested from strict to lenient until the first failure (Learn-then-Test with fixed-sequence testing,
arXiv 2110.01052). The probability that a threshold passes although its true loss reaches the bound is at most 1 -
confidence, however the loss depends on the threshold. The order is fixed beforehand and the walk ends at the first
failure, so no correction for the number of thresholds is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from reprieve.certify.bounds import betting_pvalue, hoeffding_bentkus_pvalue, upper_bound
from reprieve.certify.risks import Lengths, RiskTest, length_risks
from reprieve.certify.settings import NET_DROP, Promise
from reprieve.errors import SpecError


class Outcomes(NamedTuple):
    """Outcomes of the same problems, strict and relaxed, [n] or [n, trials] in [0, 1]."""

    strict: np.ndarray
    relaxed: np.ndarray
    tokens_per_round: float | None = None
    lengths: Lengths | None = None


def losses_of(promise: Promise, strict: np.ndarray, relaxed: np.ndarray) -> np.ndarray:
    """Return the loss of each problem: [n] or [n, trials] in [0, 1] to [n]."""
    losses = strict - relaxed if promise.loss == NET_DROP else strict * (1 - relaxed)
    means: np.ndarray = np.asarray(losses, dtype=float).reshape(len(losses), -1).mean(1)
    return means


def pvalue(promise: Promise, losses: np.ndarray, bound: float) -> float:
    """P-value of "the loss is `bound` or more"."""
    if promise.loss == NET_DROP:
        return betting_pvalue(losses, bound, confidence=promise.confidence)
    return hoeffding_bentkus_pvalue(losses, bound)


def num_needed(promise: Promise, *, answer_length: float = 1.0, budget: int = 1) -> int:
    """Return the number of problems that prove a promise if the relaxed rule changes nothing on any of them.

    Args:
        answer_length: tokens of an answer, for a promise about growth. The shorter answers are relative to their
            `budget`, the more one long answer could add, and the more problems are needed.
    """

    def proved(num: int) -> bool:
        lengths = np.full(num, answer_length)
        nothing, solved = np.zeros(num), np.ones(num)
        return paired_test(promise, solved, solved, Lengths(lengths, lengths, nothing, nothing, budget)).passed

    low, high = 0, 1
    while not proved(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if proved(middle) else (middle, high)
    return high


def paired_test(
    promise: Promise, strict: np.ndarray, relaxed: np.ndarray, lengths: Lengths | None = None
) -> PairedTest:
    """Test whether these paired outcomes prove the promise.

    Args:
        lengths: lengths of the same answers; required if the promise bounds them.

    Raises:
        ValueError: different shapes, no outcomes, or no lengths for a promise that bounds them.
    """
    if lengths is None and (promise.max_growth is not None or promise.max_unfinished is not None):
        raise ValueError("a promise about lengths needs the answers' lengths")
    risks = () if lengths is None else length_risks(promise, lengths)
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
        passed=p_value <= 1 - promise.confidence and all(risk.passed for risk in risks),
        risks=risks,
    )


@dataclass(frozen=True)
class PairedTest:
    """Result of a test on paired outcomes, as shares of problems.

    `upper_bound` holds with the promise's confidence for a single threshold. For the threshold chosen by a walk, only
    the promise holds: `max_drop`.
    """

    num_problems: int
    accuracy_strict: float
    accuracy_relaxed: float
    regressions: float  # solved strictly, failed relaxed
    improvements: float  # the reverse
    observed: float  # the loss
    upper_bound: float
    p_value: float  # of "the loss is max_drop or more"
    passed: bool  # the loss and every other risk
    risks: tuple[RiskTest, ...] = ()


@dataclass(frozen=True)
class ThresholdStep:
    """One threshold of the walk."""

    threshold: float
    evidence: PairedTest
    tokens_per_round: float | None = None


def walk(
    thresholds: Sequence[float],
    promise: Promise,
    measure: Callable[[float], tuple[Any, ...]],
    *,
    on_step: Callable[[ThresholdStep], None] = lambda step: None,
) -> list[ThresholdStep]:
    """Test thresholds in the given order, from strict to lenient, up to and including the first that fails.

    Use the last step that passed. If the first step failed, no step passed.

    Args:
        measure: maps a threshold to `Outcomes`, or to the ones that the promise needs.

    Raises:
        SpecError: no thresholds, or one twice.
    """
    if not thresholds or len(set(thresholds)) != len(thresholds):
        raise SpecError(f"thresholds must be different values, at least one, got {list(thresholds)}")
    steps: list[ThresholdStep] = []
    for threshold in thresholds:
        found = Outcomes(*measure(threshold))
        evidence = paired_test(promise, found.strict, found.relaxed, found.lengths)
        steps.append(ThresholdStep(threshold, evidence, found.tokens_per_round))
        on_step(steps[-1])
        if not steps[-1].evidence.passed:
            break
    return steps
