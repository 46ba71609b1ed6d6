"""Protocols that choose settings."""

from __future__ import annotations

import pytest

from arms import sweep_rules
from fsd_thresholds import FsdProtocol, FsdSettings
from reprieve.backends.local import LocalEngine
from reprieve.bench.arms import make_arm, make_arms
from reprieve.bench.results import BestK, best_ks
from reprieve.errors import SpecError
from reprieve.settings import AUTO
from tests.bench.toys import settings
from tests.kit.results import arm_results
from tests.kit.toys import ToyTask


def test_each_arm_gets_its_fastest_k():
    def arm(name, k, speed):
        return arm_results(f"{name}@K={k}", name=name, num_draft_tokens=k, tokens_per_second=speed)

    rows = [arm("target_only", None, 50), arm("lossless", 4, 90), arm("lossless", 8, 80), arm("margin", 8, 7)]
    best = best_ks(rows)
    assert [(found.spec, found.num_draft_tokens) for found in best] == [("lossless", 4), ("margin", 8)]
    assert best[0].by_k == {4: 90, 8: 80}


@pytest.mark.slow
def test_the_fsd_protocol_raises_the_threshold_until_accuracy_falls_too_far(pair, tmp_path):
    asked = FsdSettings(
        "random", (0.1, 0.5, 0.9), num_draft_tokens=(2, 4), main_limit=12, main_trials=1, run=settings(limit=3)
    )
    protocol = FsdProtocol(asked)
    told = []
    results, choices = protocol.run(LocalEngine(pair), ToyTask(), tmp_path, announce=told.append)
    accuracy = {arm.spec: arm.accuracy for arm in results.arms}
    floor = accuracy["target_only"] - 0.2 * (accuracy["target_only"] - accuracy["draft_only"])
    measured = [arm.spec for arm in results.arms[3:]]
    assert measured and all(accuracy[spec] > floor for spec in measured[:-1])
    assert choices.num_draft_tokens in (2, 4) and told[0].startswith("K' = ")
    assert set(choices.acceptance_rates) >= {"lossless", "random:rate=0.1", "random:rate=0.9"}
    with pytest.raises(SpecError, match="rise"):
        FsdSettings(thresholds=(0.5, 0.1))


def test_the_fsd_protocol_measures_raised_thresholds(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("fsd_thresholds.best_ks", lambda arms: [BestK("lossless", 2, {2: 1.0})])
    asked = FsdSettings(
        "random", (0.9,), num_draft_tokens=(2, 4), nearly_all=0.01, main_limit=3, main_trials=1, run=settings(limit=3)
    )
    results, _ = FsdProtocol(asked).run(LocalEngine(pair), ToyTask(), tmp_path)
    assert [arm.spec for arm in results.arms[3:]] == ["random:rate=0.9@K=4"]


def test_thresholds_that_accept_nearly_everything_get_the_next_larger_k():
    protocol = FsdProtocol(FsdSettings())
    arms = {k: make_arm("fuzzy:threshold=0.5", k) for k in (5, 15, 20, AUTO)}
    raised = [protocol._raised(arms[k], rate).label for k, rate in ((5, 0.89), (5, 0.9), (15, 1.0), (20, 1.0))]
    assert raised == [
        "fuzzy:threshold=0.5",
        "fuzzy:threshold=0.5@K=10",
        "fuzzy:threshold=0.5@K=20",
        "fuzzy:threshold=0.5",
    ]
    assert protocol._raised(arms[AUTO], 1.0) is arms[AUTO]
    with pytest.raises(SpecError, match="nearly_all must be"):
        FsdSettings(nearly_all=0)


def test_a_rule_without_a_dial_is_refused_before_any_measurement(pair, tmp_path):
    with pytest.raises(SpecError, match="has nothing to sweep"):
        FsdProtocol(FsdSettings("lossless")).run(LocalEngine(pair), ToyTask(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_sweep_sets_the_papers_own_parameter_at_every_k():
    rules = sweep_rules("lenience", [1.0, 0.5])
    assert [rule.spec for rule in rules] == ["lenience:lenience=1", "lenience:lenience=0.5"]
    labels = [arm.label for arm in make_arms(rules, [4, 8])]
    assert labels[:3] == ["target_only", "draft_only", "lossless@K=4"]
    assert "lenience:lenience=0.5@K=8" in labels
    with pytest.raises(SpecError, match="nothing to sweep"):
        sweep_rules("lossless", [0.1])
