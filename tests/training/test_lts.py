"""Calibrating ARC-Decode's bound."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from reprieve.drafters import DraftModelDrafter
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import Sampler
from reprieve.rules.lts import LtsRule
from reprieve.training.lts import (
    SwapMeter,
    bounds_of,
    collect_swaps,
    fit,
    next_step_divergence,
    upper_quantile,
    whitening,
)
from reprieve.training.settings import LtsTraining
from tests.kit.lts import CPU, PROMPT, calibration
from tests.kit.tiny import NumberTokenizer, perturbed, random_eagle, tiny_model


def test_quantiles_and_their_correction():
    values = np.arange(1.0, 101.0)
    assert upper_quantile(values, LtsTraining(delta=0.05)) == 95
    assert upper_quantile(values, LtsTraining(delta=0.1)) == 90
    corrected = upper_quantile(values, LtsTraining(delta=0.1, confidence=0.95))
    assert corrected == 96, "P(Binomial(100, 0.9) <= 95) is the first to reach 95%"
    assert binom.cdf(95, 100, 0.9) >= 0.95 > binom.cdf(94, 100, 0.9)
    with pytest.raises(SpecError, match="20 positions are too few"):
        upper_quantile(values[:20], LtsTraining(delta=0.05, confidence=0.95))


def test_the_correction_holds_in_simulation_and_the_plain_quantile_does_not():
    rng = np.random.default_rng(0)
    recipe = LtsTraining(delta=0.1, confidence=0.95)
    true = -math.log(0.1)  # of the exponential distribution
    samples = rng.exponential(size=(2000, 200))
    held = np.mean([upper_quantile(sample, recipe) >= true for sample in samples])
    plain = np.mean([upper_quantile(sample, LtsTraining(delta=0.1)) >= true for sample in samples])
    assert held >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert plain < 0.6


@pytest.mark.parametrize("tied", [True, False])
def test_swaps_equal_plain_forwards(tied):
    """One tree forward per answer against two plain forwards per token, with tied and untied embeddings."""
    target = tiny_model()
    if not tied:
        target = untied()
    answer = [7, 8, 9, 10, 11, 12]
    places, tokens = [0, 2, 2, 5], [30, 31, 9, 12]
    params = SamplingParams(temperature=0.7)
    scale = whitening(target.get_input_embeddings().weight)
    meter = SwapMeter(CachedModel(target), Sampler(params, CPU), top_k=5)
    swaps = meter.measure(PROMPT, answer, places, tokens)
    table = target.get_input_embeddings().weight
    for row, (place, token) in enumerate(zip(places, tokens, strict=True)):
        text = [*PROMPT, *answer[:place]]
        with torch.no_grad():
            logits = target(torch.tensor([text])).logits[0, -1]
            top = int(logits.argmax())
            after = [target(torch.tensor([[*text, one]])).logits[0, -1] for one in (token, top)]
            log_probs = (logits / 0.7).log_softmax(-1)
            wanted = float(next_step_divergence(*after, k=5))
            distance = float((((table[token] - table[top]) * scale) ** 2).sum())
        assert swaps.divergence[row] == pytest.approx(wanted, abs=1e-5)
        assert swaps.distance[row] == pytest.approx(distance, rel=1e-4, abs=1e-6)
        assert swaps.margin[row] == pytest.approx(float(log_probs[top] - log_probs[token]) ** 2, rel=1e-3, abs=1e-6)


def test_an_answer_is_read_once_for_its_candidates_and_effects(monkeypatch):
    """Trees are read in parts; the logits of the answer itself are not."""
    monkeypatch.setattr("reprieve.training.lts._MAX_LEAVES", 2)
    target = CachedModel(tiny_model())
    forward, plain = target.forward, []
    monkeypatch.setattr(
        target, "forward", lambda ids, block=None, **keywords: (plain.append(block is None), forward(ids, block))[1]
    )
    meter = SwapMeter(target, Sampler(SamplingParams(temperature=1.0), CPU), top_k=4)
    for answer in ([7, 8, 9, 10, 11], [7, 8, 9]):
        candidates = meter.draw_candidates(PROMPT, answer, torch.Generator().manual_seed(0))
        assert meter.measure(PROMPT, answer, *candidates).num == len(answer)
    assert plain == [True, False, False, False, True, False, False]


def untied():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=320, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    return model


def test_candidates_are_likely_and_never_the_first_choice():
    target = tiny_model()
    answer = [7, 8, 9, 10]
    meter = SwapMeter(CachedModel(target), Sampler(SamplingParams(temperature=1.0), CPU), top_k=4)
    seen = set()
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        seen |= set(zip(*meter.draw_candidates(PROMPT, answer, generator), strict=True))
    for place in range(4):
        with torch.no_grad():
            likely = target(torch.tensor([[*PROMPT, *answer[:place]]])).logits[0, -1].topk(4).indices.tolist()
        assert {token for where, token in seen if where == place} == set(likely[1:])


def test_candidates_are_tokens_the_target_may_sample():
    target = tiny_model()
    answer = [7, 8, 9, 10, 11]
    for cut, some in ((dict(top_k=3), True), (dict(top_p=0.6), None), (dict(top_k=1), False)):
        sampler = Sampler(SamplingParams(temperature=1.0, **cut), CPU)
        meter = SwapMeter(CachedModel(target), sampler, top_k=10)
        places, tokens = meter.draw_candidates(PROMPT, answer, torch.Generator().manual_seed(0))
        for place, token in zip(places, tokens, strict=True):
            with torch.no_grad():
                logits = target(torch.tensor([[*PROMPT, *answer[:place]]])).logits[:, -1]
            scores = sampler.target_scores(logits)[0]
            assert scores[token] > -math.inf and token != int(scores.argmax())
        assert some is None or len(places) == (5 if some else 0)


def tiny_pair():
    return Pair(tiny_model(), None, NumberTokenizer(), "tiny/target", None)


@pytest.mark.parametrize("bucket_by", ["none", "entropy", "distance", "margin"])
def test_algorithm_1_on_a_tiny_target(bucket_by):
    pair = tiny_pair()
    params = SamplingParams(max_new_tokens=60, temperature=1.0)
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    texts = [(PROMPT, plain.generate(PROMPT, dataclasses.replace(params, seed=seed)).token_ids) for seed in range(12)]
    recipe = LtsTraining(delta=0.1, active=6, bucket_by=bucket_by, buckets=3)
    scale, swaps = collect_swaps(pair, texts, recipe, params)
    assert swaps.num == 12 * 60
    made = fit(pair, "tiny", scale, swaps, recipe)
    assert len(made.tolerances) == (1 if bucket_by == "none" else 3)
    bound, tolerance = bounds_of(made, swaps)
    assert (bound <= tolerance + 1e-6).mean() == pytest.approx(0.9, abs=0.02), "tau is U's own quantile"
    for raw, factors in ((swaps.distance, made.embedding_factors), (swaps.margin, made.logit_factors)):
        if bucket_by == "none":
            assert (swaps.divergence <= float(factors[0]) * raw * (1 + 1e-6)).mean() == pytest.approx(0.9, abs=0.02)
    assert (swaps.divergence <= bound + 1e-6).mean() >= 0.79, "both sides hold at 90%: their minimum at 80% or more"
    safer = fit(pair, "tiny", scale, swaps, dataclasses.replace(recipe, safety=2.0))
    assert torch.allclose(safer.logit_factors, 2 * made.logit_factors)
    again = collect_swaps(pair, texts, recipe, params)[1]
    assert np.array_equal(again.margin, swaps.margin), "the same seed, the same candidates"


def test_recipes_are_checked():
    for changes, told in (
        ({"delta": 0.0}, "delta must be in"),
        ({"active": 1}, "active must be 2 or more, got 1"),
        ({"safety": 0.5}, "safety must be in"),
        ({"bucket_by": "length"}, "bucket_by must be one of none, entropy, distance, margin, got 'length'"),
        ({"buckets": 0}, "buckets must be 1 or more, got 0"),
        ({"confidence": 1.0}, "confidence must be in"),
    ):
        with pytest.raises(SpecError, match=told):
            LtsTraining(**changes)


def test_a_strict_score_keeps_the_targets_greedy_text_on_trees_and_chains():
    from reprieve.drafters import EagleDrafter, EagleSettings

    target = tiny_model()
    plain = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer())
    wanted = plain.generate(PROMPT, SamplingParams(max_new_tokens=40)).token_ids
    made = calibration(scale=torch.ones(32), tolerances=torch.tensor([50.0]))
    head = random_eagle(target)
    cached = CachedModel(target, hidden_layers=head.layers_read)
    trees = EagleDrafter(head, vocab_size=48, settings=EagleSettings(depth=4, top_k=4, total_tokens=20))
    chains = DraftModelDrafter(CachedModel(perturbed(target, noise=0.2)), CPU)
    for drafter in (trees, chains):
        for theta, same in ((1.0, True), (-9.0, False)):
            rule = LtsRule.of(made, theta=theta)
            decoder = SpeculativeDecoder(cached, drafter, NumberTokenizer(), rule=rule)
            assert (decoder.generate(PROMPT, SamplingParams(max_new_tokens=40)).token_ids == wanted) is same


def test_drafted_candidates_are_the_drafts_tokens_where_the_models_differ():
    target = tiny_model()
    pair = Pair(target, perturbed(target, noise=0.3), NumberTokenizer(), "t", "d")
    answer = [4, 5, 6, 7, 8, 9, 10, 11]
    params = SamplingParams(temperature=1.0, draft_temperature=0.0)
    meter = SwapMeter(pair.cached_target(), Sampler(params, pair.device), top_k=5)
    places, tokens = meter.drafted_candidates(pair.cached_draft(), PROMPT, answer)
    with torch.inference_mode():
        both = [model(torch.tensor([[*PROMPT, *answer]])).logits[0] for model in (pair.target, pair.draft)]
    own, drafted = (logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() for logits in both)
    wanted = [place for place in range(len(answer)) if own[place] != drafted[place]]
    assert places == wanted and tokens == [drafted[place] for place in wanted] and wanted
