"""Certified leniency: validity by simulation, the walk, certificates."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from functools import partial

import numpy as np
import pytest

from reprieve.bench.settings import Promise
from reprieve.certify.bounds import ConfidenceSequence, betting_pvalue, upper_bound
from reprieve.certify.fixed_sequence import ThresholdStep, paired_test, walk
from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.heads.certificates import Certificate, Conditions, portable_spec, read_certificates, warn_of_certificates
from reprieve.identity import PairIdentity
from reprieve.rules.judge import JudgeRule
from reprieve.rules.margin import MarginRule
from reprieve.settings import PromptSettings, SamplingSettings
from tests.kit.tiny import random_head

NUM_REPETITIONS = 2000
# Two standard errors of a share of 5% in 2,000 repetitions: an exact test may exceed 5% by chance, not by more.
TOLERANCE = 2 * math.sqrt(0.05 * 0.95 / NUM_REPETITIONS)


def test_the_betting_bound_matches_the_literature_at_gsm8ks_size():
    rng = np.random.default_rng(0)
    samples = [rng.choice([1.0, 0.0, -1.0], p=[0.03, 0.94, 0.03], size=1319) for _ in range(40)]
    above = [
        upper_bound(partial(betting_pvalue, drops), -1.0, 1.0, confidence=0.95) - drops.mean() for drops in samples
    ]
    assert np.mean(above) == pytest.approx(0.015, abs=0.002), "Hoeffding's would be 0.067"


def step(promise, threshold, strict, relaxed, lengths=None):
    return ThresholdStep(threshold, paired_test(promise, strict, relaxed, lengths), 5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shares",
    [(0.03, 0.01), (0.1, 0.08), (0.02, 0.0)],  # regressions, improvements: the true drop is 0.02
)
def test_at_most_one_walk_in_twenty_gives_a_wrong_certificate(shares, monkeypatch):
    """Every threshold loses slightly more than promised, so any pass is wrong; the whole walk is tested."""
    monkeypatch.setattr("reprieve.certify.fixed_sequence.upper_bound", lambda *_, **__: 1.0)  # not read here
    rng = np.random.default_rng(1)
    promise = Promise(0.0199)

    def measure(threshold):
        kind = rng.choice([1, 2, 0], p=[*shares, 1 - sum(shares)], size=(1000, 1))
        return step(promise, threshold, (kind < 2).astype(float), (kind != 1).astype(float))

    wrong = sum(any(step.evidence.passed for step in walk([1, 2, 3, 4], measure)) for _ in range(NUM_REPETITIONS))
    assert wrong / NUM_REPETITIONS <= 0.05 + TOLERANCE


@pytest.mark.parametrize("where", ["first", "last", "mixed"])
def test_the_order_of_a_data_set_does_not_raise_the_error_rate(where):
    """The loss lies in one category, a tenth of the problems, placed first, last or mixed with the others."""
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(NUM_REPETITIONS):
        lossy = rng.choice([1.0, 0.0], p=[0.21, 0.79], size=100)  # a true drop of 0.021 over all 1,000
        rest = rng.choice([1.0, 0.0, -1.0], p=[0.01, 0.98, 0.01], size=900)
        drops = np.concatenate([rest, lossy] if where == "last" else [lossy, rest])
        wrong += betting_pvalue(rng.permutation(drops) if where == "mixed" else drops, 0.02) <= 0.05
    assert wrong / NUM_REPETITIONS <= 0.05 + TOLERANCE


def test_trying_every_threshold_would_break_the_promise():
    """All thresholds are wrong: any of eight passes more than twice as often as the first, where the walk stops."""
    rng = np.random.default_rng(2)
    promise = Promise(0.0199, 0.95)

    def passes():
        drops = rng.choice([1.0, 0.0, -1.0], p=[0.09, 0.84, 0.07], size=300)
        return betting_pvalue(drops, promise.max_drop) <= 0.05

    tried = [[passes() for _ in range(8)] for _ in range(500)]
    assert sum(map(any, tried)) > 2 * sum(first for first, *_ in tried)


def test_the_walk_ends_at_the_first_failure():
    outcomes = {0.1: 0, 0.2: 0, 0.3: 20, 0.4: 0}

    def measure(threshold):
        spoiled = np.arange(400) < outcomes[threshold]
        return step(Promise(0.02), threshold, np.ones((400, 1)), 1.0 - spoiled[:, None])

    steps = walk(list(outcomes), measure)
    assert [step.threshold for step in steps] == [0.1, 0.2, 0.3], "the failure ends it, whatever comes after"
    assert [step.evidence.passed for step in steps] == [True, True, False]


def test_several_trials_of_a_problem_are_one_observation():
    strict, relaxed = np.ones((100, 3)), np.ones((100, 3))
    relaxed[0, 0] = 0
    evidence = paired_test(Promise(0.1), strict, relaxed)
    assert evidence.num_problems == 100 and evidence.observed == pytest.approx(1 / 300)


def test_evidence_counts_regressions_and_improvements():
    strict, relaxed = np.array([[1.0], [1], [0], [1]]), np.array([[1.0], [0], [1], [1]])
    evidence = paired_test(Promise(0.5), strict, relaxed)
    assert (evidence.regressions, evidence.improvements, evidence.observed) == (0.25, 0.25, 0.0)
    assert not evidence.passed and evidence.upper_bound > 0.5


@pytest.mark.slow
def test_the_confidence_sequence_covers_the_truth_at_all_times():
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(100):
        sequence = ConfidenceSequence(resolution=0.01)
        for drop in rng.choice([1.0, 0.0, -1.0], p=[0.13, 0.84, 0.03], size=300):
            sequence.update(drop)
            if not sequence.interval[0] - 1e-9 <= 0.1 <= sequence.interval[1] + 1e-9:
                missed += 1
                break
    assert missed <= 5 + 4, "two standard errors above 5 of 100"


def test_means_between_grid_points_are_covered():
    sequence = ConfidenceSequence(resolution=0.01)
    for _ in range(3000):
        sequence.update(0.005)
    low, high = sequence.interval
    assert low <= 0.005 <= high


def test_the_sequence_starts_with_the_full_range_and_narrows():
    sequence = ConfidenceSequence()
    assert sequence.interval == (-1.0, 1.0)
    for _ in range(400):
        sequence.update(0.0)
    low, high = sequence.interval
    assert sequence.mean == 0 and -0.1 < low < 0 < high < 0.1


@pytest.mark.parametrize(
    ("values", "message"), [(dict(max_drop=0.0), "max_drop"), (dict(max_drop=0.1, confidence=1.0), "confidence")]
)
def test_promises_out_of_range_are_refused(values, message):
    with pytest.raises(SpecError, match=message):
        Promise(**values)


def test_losses_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        betting_pvalue(np.array([-1.5, 0.0]), 0.1)
    with pytest.raises(ValueError, match="none"):
        betting_pvalue(np.array([]), 0.1)
    with pytest.raises(SpecError, match="different values"):
        walk([1, 1], lambda threshold: None)


IDENTITY = PairIdentity("t", "d", "tw", "dw", "tok")
HERE = Conditions(
    pair=IDENTITY, task="arithmetic", prompt=PromptSettings(), sampling=SamplingSettings(), num_draft_tokens=16,
    drafter="draft", dtype="float32",
)  # fmt: skip


def certificate(rule, **changes):
    values = dict(
        statement="It holds.", rule=rule.spec, portable_rule=portable_spec(rule), threshold=rule.dial_value,
        promise={"max_drop": 0.02, "confidence": 0.95, "loss": "net_drop"}, verdict="confirmed", conditions=HERE,
        calibration={"split": "validation", "steps": []}, held_out={"split": "test"},
    )  # fmt: skip
    return Certificate(**{**values, **changes})


def test_certificates_round_trip_through_a_file(tmp_path):
    made = certificate(MarginRule(delta=2))
    (tmp_path / "c.json").write_text(made.to_json())
    assert Certificate.load(tmp_path / "c.json") == made
    assert json.loads(made.to_json())["statement"] == "It holds."


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "reprieve certificate", "schema": 9}'])
def test_files_that_are_no_certificate_are_refused(tmp_path, content):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ReprieveError, match="cannot be read"):
        Certificate.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(task="gsm8k:path=x"), "task gsm8k"),
        (dict(sampling=SamplingSettings(temperature=0.6)), "temperature 0.6 "),
        (dict(num_draft_tokens=8), "num_draft_tokens 8 "),
        (dict(dtype="bfloat16"), "dtype bfloat16"),
        (dict(drafter="ngram"), "drafter ngram"),
        (dict(drafter_weights="eeee"), "drafter_weights eeee"),
        (dict(prompt=PromptSettings(max_new_tokens=64)), "max_new_tokens 64 "),
    ],
)
def test_other_conditions_raise_a_warning_that_names_them(change, told):
    with pytest.warns(UserWarning, match=f"does not hold here: .*{told}"):
        certificate(MarginRule()).check(dataclasses.replace(HERE, **change), where="of margin")


def test_another_prompt_format_is_refused():
    for prompt in (PromptSettings(chat_template=True), PromptSettings(chat_template=True, thinking="off")):
        with pytest.raises(SpecError, match=r"made with raw prompts, here it is the chat template"):
            certificate(MarginRule()).check(dataclasses.replace(HERE, prompt=prompt), where="of margin")


def test_the_same_conditions_raise_no_warning_and_another_pair_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certificate(MarginRule()).check(HERE, where="of margin")
    other = dataclasses.replace(HERE, pair=dataclasses.replace(IDENTITY, target_weights="other"))
    with pytest.raises(PairError, match="target_weights"):
        certificate(MarginRule()).check(other, where="of margin")


def test_certificates_move_with_their_head_and_warn_under_other_conditions(tmp_path):
    folder = tmp_path / "moved"
    head = random_head(pair=IDENTITY)
    head.save_pretrained(folder)
    rule = JudgeRule.of(head, threshold=0.1)
    made = certificate(rule, portable_rule=f"judge:path={head.fingerprint},threshold=0.1")
    (folder / "certificates").mkdir()
    (folder / "certificates" / "c.json").write_text(made.to_json())
    here = dataclasses.replace(rule, path=str(folder))
    assert len(read_certificates(folder)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_certificates(here, {str(folder): folder}, HERE)
        # No certificate covers another threshold, so there is nothing to warn about.
        warn_of_certificates(
            dataclasses.replace(here, threshold=0.2), {str(folder): folder}, dataclasses.replace(HERE, dtype="bfloat16")
        )
    with pytest.warns(UserWarning, match="dtype bfloat16"):
        warn_of_certificates(here, {str(folder): folder}, dataclasses.replace(HERE, dtype="bfloat16"))
