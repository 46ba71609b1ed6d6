"""The audit of accepted tokens."""

import numpy as np

from arc_audit import audit
from reprieve.drafters import DraftModelDrafter
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.heads.loading import attach_heads
from reprieve.rules import parse_rule
from reprieve.tasks import load_task
from reprieve.training.lts import Swaps, bounds_of
from tests.kit.lts import calibration


def test_the_audit_counts_swapped_tokens_and_those_within_the_bound(bundled_pair):
    task = load_task("arithmetic")
    problems = task.problems("test", 3)
    rule = attach_heads(parse_rule("lts:theta=0.9"), bundled_pair.target_name)
    decoder = SpeculativeDecoder(
        bundled_pair.cached_target(),
        DraftModelDrafter(bundled_pair.cached_draft(), bundled_pair.device),
        bundled_pair.tokenizer,
        rule=rule,
    )
    params = SamplingParams(temperature=1.0, seed=1)
    found = audit("lts", decoder, bundled_pair, task, problems, params)
    assert found.num_problems == 3
    seen = found.summary(rule.head)
    assert seen["accepted"]["num"] == found.swaps.num > seen["swapped"]["num"] >= seen["rescued_and_swapped"]["num"]
    assert (found.swaps.divergence[~found.swapped] < 1e-5).all(), "the same token: nothing was swapped"
    bound, _ = bounds_of(rule.head, found.swaps)
    assert seen["accepted"]["num_within_bound"] == int((found.swaps.divergence <= bound + 1e-5).sum())
    low, high = seen["accepted"]["within_bound_ci95"]
    assert low <= seen["accepted"]["within_bound"] <= high
    rescued = found.rescued
    assert (bound[rescued] <= 0.1 * float(rule.head.tolerances[0]) * (1 + 1e-3)).all(), "all it rescued had LTS >= 0.9"
    assert "within_bound" not in found.summary()["accepted"]


def test_an_audit_without_accepted_tokens_reports_zero():
    from arc_audit import Audit

    seen = Audit("x", 1, 0, Swaps.join([]), np.empty(0, bool), np.empty(0, bool)).summary(calibration())
    assert seen["accepted"] == {"num": 0}
