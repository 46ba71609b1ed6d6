"""Several risks at one error rate: lost, longer and unfinished answers."""

import numpy as np
import pytest

from reprieve.bench.settings import Promise
from reprieve.certify.fixed_sequence import (
    Lengths,
    ThresholdStep,
    growth_pvalue,
    length_risks,
    num_needed,
    paired_test,
    walk,
)
from reprieve.errors import SpecError

BUDGET = 512
NUM_TASKS = 1000
PROMISE = Promise(0.03, max_growth=0.1, max_unfinished=0.01)


def lengths_of(rng, num, *, growth=0.0, unfinished=0.0):
    """Answers of about 200 tokens; relaxed ones vary by half and are longer by `growth` on average."""
    strict = rng.uniform(100, 300, num)
    relaxed = strict * (1 + growth) * rng.uniform(0.5, 1.5, num)
    cut = (rng.random(num) < unfinished).astype(float)
    return Lengths(strict, np.minimum(relaxed, BUDGET), np.zeros(num), cut, BUDGET)


def test_a_rule_whose_answers_grow_is_refused_even_if_all_are_right():
    rng = np.random.default_rng(0)
    solved = np.ones(1000)
    grown = paired_test(PROMISE, solved, solved, lengths_of(rng, 1000, growth=0.9))
    assert not grown.passed and grown.p_value < 1e-6, "it loses nothing"
    growth, unfinished = grown.risks
    assert growth.observed > 0.7 and growth.contradicted and not growth.passed
    assert unfinished.passed
    alike = paired_test(PROMISE, solved, solved, lengths_of(rng, 1000))
    assert alike.passed and [risk.name for risk in alike.risks] == ["growth", "unfinished"]
    assert alike.risks[0].upper_bound < 0.1 and abs(alike.risks[0].observed) < 0.05


def test_a_rule_whose_answers_do_not_end_is_refused():
    solved = np.ones(1000)
    lengths = lengths_of(np.random.default_rng(0), 1000, unfinished=0.05)
    found = paired_test(PROMISE, solved, solved, lengths)
    assert not found.passed and not found.risks[1].passed and found.risks[0].passed


@pytest.mark.slow
@pytest.mark.parametrize("risk", ["growth", "unfinished", "drop"])
def test_a_risk_at_its_bound_is_certified_in_at_most_one_task_in_twenty(risk, monkeypatch):
    """A thousand simulated tasks whose true risk is exactly the bound."""
    monkeypatch.setattr("reprieve.certify.fixed_sequence.upper_bound", lambda *_, **__: 1.0)  # not read here
    rng = np.random.default_rng(1)
    passed = 0
    for _ in range(NUM_TASKS):
        lengths = lengths_of(
            rng, 400, growth=0.1 if risk == "growth" else -0.1, unfinished=0.01 if risk == "unfinished" else 0.0
        )
        lost = (rng.random(400) < 0.03).astype(float) if risk == "drop" else np.zeros(400)
        tests = length_risks(PROMISE, lengths) if risk != "drop" else ()
        passed += (
            paired_test(PROMISE, np.ones(400), 1 - lost, lengths).passed
            if risk == "drop"
            else all(test.passed for test in tests)
        )
    assert passed <= 0.05 * NUM_TASKS + 3 * np.sqrt(0.05 * 0.95 * NUM_TASKS)


def test_the_walk_ends_at_the_first_threshold_with_an_unproved_risk():
    rng = np.random.default_rng(2)
    grows = {1.0: 0.0, 2.0: 0.02, 3.0: 0.5, 4.0: 0.0}
    solved = np.ones(800)

    def measure(at):
        return ThresholdStep(at, paired_test(PROMISE, solved, solved, lengths_of(rng, 800, growth=grows[at])))

    steps = walk(list(grows), measure)
    assert [step.threshold for step in steps] == [1.0, 2.0, 3.0]
    assert [step.evidence.passed for step in steps] == [True, True, False]


def test_the_p_value_falls_as_more_growth_is_allowed():
    lengths = lengths_of(np.random.default_rng(3), 300, growth=0.2)
    values = [growth_pvalue(PROMISE, lengths, allowed) for allowed in (0.1, 0.2, 0.3, 0.5, 1.0)]
    assert values == sorted(values, reverse=True) and values[0] > 0.05 > values[-1]


def test_bounds_out_of_range_and_missing_lengths_are_refused():
    with pytest.raises(SpecError, match=r"max_growth must be in \(0, 10\], got 0"):
        Promise(0.03, max_growth=0)
    with pytest.raises(SpecError, match=r"max_unfinished must be in \(0, 0.99\], got 1"):
        Promise(0.03, max_unfinished=1)
    with pytest.raises(ValueError, match="needs the answers' lengths"):
        paired_test(PROMISE, np.ones(3), np.ones(3))


def test_one_problem_can_be_enough():
    assert num_needed(Promise(0.99, confidence=0.5)) == 1


def test_more_problems_are_needed_the_further_answers_lie_below_their_budget():
    needed = [num_needed(PROMISE, answer_length=200, budget=budget) for budget in (256, 512, 2048)]
    assert needed == sorted(needed) and needed[0] >= num_needed(Promise(0.03))
