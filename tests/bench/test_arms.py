"""Arms: K per arm, controls and direct sampling."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from reprieve.backends.local import LocalEngine
from reprieve.backends.settings import EngineSettings
from reprieve.bench.arms import make_arm, make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.settings import RunSettings
from reprieve.bench.summary import summarise
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.loading import load_head
from reprieve.models.sampling import truncated_tokens
from reprieve.rules import parse_rule
from reprieve.rules.judge import JudgeRule
from reprieve.rules.top_k import TopKRule
from reprieve.settings import SamplingParams, SamplingSettings
from tests.bench.toys import run
from tests.kit.tiny import random_head


def test_each_arm_may_set_its_own_k():
    arms = make_arms(["lossless@K=4", "top_k:k=3@K=8", "margin"], [16])
    assert [(arm.label, arm.num_draft_tokens) for arm in arms[2:]] == [
        ("lossless@K=4", 4), ("top_k:k=3@K=8", 8), ("margin:delta=1", 16),
    ]  # fmt: skip


def test_vllms_own_methods_are_arms():
    arms = make_arms(["vllm:synthetic,acceptance_length=3", "vllm:block@K=8", "vllm:fly"], [4])
    by_label = {arm.label: arm for arm in arms}
    synthetic = by_label["vllm:synthetic,acceptance_length=3"]
    assert dict(synthetic.vllm) == {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    assert synthetic.rule_name == synthetic.label and by_label["vllm:block@K=8"].num_draft_tokens == 8
    assert by_label["vllm:block@K=8"].rule_name == "vllm:block" and not by_label["lossless"].vllm
    with pytest.raises(SpecError, match="vllm must be one of block, synthetic, fly"):
        make_arms(["vllm:lenient"], [4])


@pytest.mark.parametrize(
    "spec", ["margin@K=", "margin@K=x", "direct:judge:path=x", "direct:fuzzy", "direct:top_k@K=4", "certified:none"]
)
def test_invalid_arms_are_refused(spec):
    with pytest.raises(ReprieveError):
        make_arms([spec], [16])


def test_rerunning_lossless_measures_the_noise_floor(pair, tmp_path):
    arms = make_arms(["lossless_rerun"], [4])
    greedy = {arm.spec: arm for arm in summarise(run(pair, arms, tmp_path / "greedy")).arms}
    difference, low, high = greedy["lossless_rerun"].accuracy_vs_lossless
    assert difference == 0 and low < 0 < high, "six equal problems do not prove equality"
    assert greedy["lossless"].accuracy_vs_lossless == [0.0, 0.0, 0.0], "it is the same arm"
    sampled = run(pair, arms, tmp_path / "sampled", sampling=SamplingSettings(temperature=1.0))
    texts = {label: [r.text for r in sampled.records if r.arm == label] for label in ("lossless", "lossless_rerun")}
    assert texts["lossless"] != texts["lossless_rerun"], "draws of its own"


ACCEPTED = {
    "top_k:k=3": lambda probs: probs >= probs.topk(3).values[-1],
    "margin:delta=1.5": lambda probs: probs.log() >= probs.max().log() - 1.5,
    "ratio:ratio=0.4,k=none": lambda probs: probs >= 0.4 * probs.max(),
    "floor:min_prob=0.05": lambda probs: probs >= 0.05,
    "typical": lambda probs: probs >= min(0.09, 0.3 * math.exp(float((probs * probs.log()).sum()))),
}


@pytest.mark.parametrize("spec", ACCEPTED)
def test_direct_arms_keep_exactly_the_tokens_that_the_rule_accepts(spec):
    torch.manual_seed(0)
    for _ in range(5):
        logits = 3 * torch.randn(300)
        wanted = ACCEPTED[spec](logits.softmax(-1))
        wanted[logits.argmax()] = True
        assert torch.equal(truncated_tokens(parse_rule(spec), logits, logits), wanted)


def test_a_direct_arm_samples_accepted_tokens_in_proportion_to_their_probabilities(pair, tmp_path):
    arm = make_arms(["direct:top_k:k=2"], [4])[-1]
    decoder = arm.decoder(pair)
    firsts = []
    for seed in range(300):
        params = arm.params(SamplingParams(max_new_tokens=1, temperature=1.0, seed=seed))
        firsts.append(decoder.generate([1, 2, 3], params).token_ids[0])
    logits = pair.target(torch.tensor([[1, 2, 3]])).logits[0, -1].detach()
    top = logits.topk(2).indices.tolist()
    share = float(logits[top].softmax(-1)[0])
    assert set(firsts) <= set(top)
    assert firsts.count(top[0]) / 300 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 300) + 1e-3)


def test_direct_sampling_requires_a_rule_of_the_distribution_alone():
    with pytest.raises(SpecError, match="distribution alone"):
        SamplingParams(truncation=JudgeRule.of(random_head()))
    assert dataclasses.replace(SamplingParams(), truncation=TopKRule()).truncation == TopKRule()


class TestAuto:
    JUDGE = "reprieve/arithmetic-length-judge"

    def test_a_head_named_for_the_run_serves_its_rule_and_other_arms_use_auto(self):
        judge = "judge:path=reprieve/arithmetic-judge,threshold=0.03"
        named = f"auto:path={self.JUDGE}"
        made = {arm.label: arm.num_draft_tokens for arm in make_arms([judge], [named])[2:]}
        assert made == {"lossless": "auto", f"{judge}@K={named}": named}, "a label says who has it"
        with pytest.raises(SpecError, match="serves none of the arms"):
            make_arms(["typical"], [named])

    def test_an_arm_keeps_the_length_head_it_names(self, bundled_pair):
        arm = make_arm(f"lossless@K=auto:path={self.JUDGE}", 8)
        assert arm.num_draft_tokens == f"auto:path={self.JUDGE}"
        with pytest.raises(SpecError, match="trained for judge"):
            arm.decoder(bundled_pair)

    @pytest.mark.parametrize("k", ["0", "atuo", "\u00b2", "auto:", "-1", "8.5"])
    def test_other_values_of_k_are_refused(self, k):
        with pytest.raises(SpecError, match="own K"):
            make_arm(f"lossless@K={k}", 8)

    def test_conditions_name_the_length_head(self, bundled_pair):
        engine = LocalEngine(bundled_pair)
        arm = make_arm("lossless@K=auto", 8)
        named = engine.draft_tokens(arm, "draft")
        head = load_head("reprieve/arithmetic-length-lossless")
        assert named == f"auto:{head.fingerprint}"
        assert engine.draft_tokens(arm, "ngram") == "auto", "there no head decides"
        assert engine.draft_tokens(dataclasses.replace(arm, num_draft_tokens=8), "draft") == 8
        config = RunConfig.of(engine, [arm], RunSettings())
        assert config.conditions(engine, arm).num_draft_tokens == named
        assert named in config.heads.values()
        assert "length of" not in str(RunConfig.of(engine, [arm], RunSettings(drafter="ngram")).heads)

    def test_the_price_changes_a_heads_fingerprint(self):
        head = load_head("reprieve/arithmetic-length-lossless")
        assert dataclasses.replace(head, price=head.price / 2).fingerprint != head.fingerprint

    def test_servers_replace_auto_by_a_number(self):
        served = EngineSettings("vllm")
        assert served.draft_tokens("auto", 4, 8) == (8, 4)
        assert EngineSettings().draft_tokens("auto", 4) == ("auto", 4)


def test_charts_name_arms_without_the_paths_of_heads():
    judge = JudgeRule(path="/long/way/j", threshold=0.1).with_head(random_head())
    arm = make_arm(judge, 8, suffixed=True)
    assert arm.label == "judge:path=/long/way/j,threshold=0.1@K=8"
    assert arm.short_label == "judge:threshold=0.1@K=8"
    assert make_arm("lossless_rerun@K=4@drafter=ngram", 8).short_label == "lossless_rerun@K=4@drafter=ngram"
    assert make_arm("direct:top_k:k=2", 8).short_label == "direct:top_k:k=2"
