"""Certified leniency: the most lenient threshold whose loss is proved to be below a bound.

Thresholds are tested from strict to lenient until the first failure (Learn-then-Test with fixed-sequence testing,
arXiv 2110.01052). The probability that a threshold passes although its true loss reaches the bound is at most 1 -
confidence, however the loss depends on the threshold. The order is fixed beforehand and the walk ends at the first
failure, so no correction for the number of thresholds is needed.

A promise can also bound two other risks: longer answers and unfinished answers. Each is a paired difference, tested
like the loss. A threshold is certified if every risk is proved at the same level. The rejected hypothesis is then "at
least one risk is too large". The largest p-value is valid for it, whatever the dependence of the risks (Berger, 1982:
intersection-union tests), so the level is not divided among them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from reprieve.bench.settings import Promise
from reprieve.certify.bounds import betting_pvalue, upper_bound
from reprieve.errors import SpecError

_MOST_GROWTH = 100.0


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
    measure: Callable[[float], ThresholdStep],
    *,
    on_step: Callable[[ThresholdStep], None] = lambda step: None,
) -> list[ThresholdStep]:
    """Test thresholds in the given order, from strict to lenient, up to and including the first that fails.

    Use the last step that passed. If the first step failed, no step passed.

    Args:
        measure: tests one threshold.

    Raises:
        SpecError: no thresholds, or one twice.
    """
    if not thresholds or len(set(thresholds)) != len(thresholds):
        raise SpecError(f"thresholds must be different values, at least one, got {list(thresholds)}")
    steps: list[ThresholdStep] = []
    for threshold in thresholds:
        steps.append(measure(threshold))
        on_step(steps[-1])
        if not steps[-1].evidence.passed:
            break
    return steps


def growth_pvalue(promise: Promise, lengths: Lengths, growth: float) -> float:
    """P-value of "the mean relaxed length is (1 + growth) times the mean strict one, or more".

    The mean of relaxed - (1 + growth) * strict is then 0 or more; divided by its largest size it lies in [-1, 1].
    """
    excess = _per_problem(lengths.relaxed) - (1 + growth) * _per_problem(lengths.strict)
    return betting_pvalue(excess / ((1 + growth) * lengths.budget), 0.0, confidence=promise.confidence)


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
    if strict.shape != relaxed.shape or not len(strict):
        raise ValueError(f"outcomes must be of the same problems, got shapes {strict.shape} and {relaxed.shape}")
    risks = () if lengths is None else length_risks(promise, lengths)
    losses = _per_problem(strict - relaxed)
    proof = partial(betting_pvalue, losses, confidence=promise.confidence)
    loss = _test("loss", promise, promise.max_drop, float(losses.mean()), proof, -1.0)
    return PairedTest(
        num_problems=len(losses),
        accuracy_strict=float(strict.mean()),
        accuracy_relaxed=float(relaxed.mean()),
        regressions=float((strict * (1 - relaxed)).mean()),
        improvements=float((relaxed * (1 - strict)).mean()),
        observed=loss.observed,
        upper_bound=loss.upper_bound,
        p_value=loss.p_value,
        passed=loss.passed and all(risk.passed for risk in risks),
        risks=risks,
    )


def length_risks(promise: Promise, lengths: Lengths) -> tuple[RiskTest, ...]:
    """Test the risks that a promise names."""
    tests = []
    if promise.max_growth is not None:
        grown = float(lengths.relaxed.mean() / lengths.strict.mean()) - 1 if lengths.strict.any() else 0.0
        proof = partial(growth_pvalue, promise, lengths)
        tests.append(_test("growth", promise, promise.max_growth, grown, proof, 0.0, _MOST_GROWTH))
    if promise.max_unfinished is not None:
        more = _per_problem(lengths.relaxed_cut) - _per_problem(lengths.strict_cut)
        proof = partial(betting_pvalue, more, confidence=promise.confidence)
        tests.append(_test("unfinished", promise, promise.max_unfinished, float(more.mean()), proof, -1.0))
    return tuple(tests)


def _test(
    name: str,
    promise: Promise,
    bound: float,
    observed: float,
    proof: Callable[[float], float],  # the p-value of each bound
    low: float,
    high: float = 1.0,
) -> RiskTest:
    """Test one risk at its promised bound, and find the smallest bound that is proved."""
    p_value = proof(bound)
    highest = upper_bound(proof, low, high, confidence=promise.confidence)
    return RiskTest(name, bound, observed, highest, p_value, passed=p_value <= 1 - promise.confidence)


def _per_problem(values: np.ndarray) -> np.ndarray:
    """Return the mean of each problem over its trials: [n] or [n, trials] to [n]."""
    means: np.ndarray = np.asarray(values, dtype=float).reshape(len(values), -1).mean(1)
    return means


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

    enough = 1
    while not proved(enough):
        enough *= 2
    return bisect.bisect_left(range(enough), True, lo=max(1, enough // 2), key=proved)
