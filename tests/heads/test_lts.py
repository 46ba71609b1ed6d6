"""ARC-Decode's bound, worked by hand."""

import dataclasses
import json
import math

import pytest
import torch

from reprieve.drafters import DraftModelDrafter
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.heads.loading import attach_heads, require_heads_fit
from reprieve.heads.lts import LtsCalibration
from reprieve.models.cached_model import CachedModel
from reprieve.rules import accepts, parse_rule
from reprieve.rules.lts import LtsRule, lts_bound, raw_scores
from reprieve.types import Evidence
from tests.kit.lts import CPU, PROMPT, calibration
from tests.kit.tiny import IDENTITY, NumberTokenizer, perturbed, tiny_model


def evidence(probs, token_ids, embeddings):
    """Rows of probabilities [n, V], a token for each, and the embedding of every token [V, D]."""
    logits, ids, table = torch.tensor(probs).log(), torch.tensor(token_ids), torch.tensor(embeddings)
    return Evidence(
        token_ids=ids,
        target_logits=logits,
        greedy=False,
        lossless_accepts=torch.zeros(len(ids), dtype=torch.bool),
        target_scores=logits,
        token_embeddings=table[ids],
        top_embeddings=table[logits.argmax(-1)],
    )


TABLE = [[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]]


PROBS = [[0.6, 0.3, 0.1]] * 3


def test_the_bound_by_hand():
    seen = evidence(PROBS, [0, 1, 2], TABLE)
    distance, margin = raw_scores(seen, torch.tensor([1.0, 0.5]))
    assert distance.tolist() == pytest.approx([0.0, 4.0, 4.0]), "the second coordinate is halved, then squared"
    assert margin.tolist() == pytest.approx([0.0, math.log(2) ** 2, math.log(6) ** 2], rel=1e-5)
    bound = lts_bound(distance, margin, embedding_factor=0.1, logit_factor=0.2)
    assert bound.tolist() == pytest.approx([0.0, 0.2 * math.log(2) ** 2, 0.4], rel=1e-5), "the tighter side"
    rule = LtsRule.of(calibration(), theta=0.3)
    assert rule.risk(seen).tolist() == pytest.approx([0.0, 0.4 * math.log(2) ** 2, 0.8], rel=1e-5)
    assert accepts(rule, seen).tolist() == [True, True, False], "LTS 1, 0.81 and 0.2 against theta 0.3"
    for theta, passed in {0.0: [True] * 3, 0.9: [True, False, False], 1.0: [True, False, False]}.items():
        assert accepts(rule.with_dial(theta), seen).tolist() == passed
    assert not accepts(rule.with_dial(math.inf), seen).any()


def test_probabilities_are_clamped_and_cut_off_tokens_stay_out():
    seen = evidence([[1.0, 0.0, 0.0]], [1], TABLE)
    assert raw_scores(seen, torch.ones(2))[1].item() == pytest.approx(math.log(1e-10) ** 2, rel=1e-5)
    assert not accepts(LtsRule.of(calibration(), theta=-1e9), seen).any(), "the target cannot draw it at all"


def test_each_bucket_has_its_own_constants():
    seen = evidence([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]], [1, 2], TABLE)
    cut = (math.log(2) ** 2 + math.log(6) ** 2) / 2
    made = calibration(
        embedding_factors=torch.tensor([0.1, 1.0]),
        logit_factors=torch.tensor([0.2, 2.0]),
        tolerances=torch.tensor([0.5, 5.0]),
        edges=torch.tensor([cut]),
        bucket_by="margin",
    )
    bound, tolerance = made.bound(seen)
    assert tolerance.tolist() == [0.5, 5.0]
    assert bound.tolist() == pytest.approx([0.2 * math.log(2) ** 2, 4.0], rel=1e-5)


def test_a_calibration_is_saved_bound_to_its_target(tmp_path):
    made = calibration(settings={"top_k": 10})
    made.save_pretrained(tmp_path / "c")
    again = LtsCalibration.from_pretrained(tmp_path / "c")
    assert again.fingerprint == made.fingerprint and again.settings == {"top_k": 10} and again.pair == IDENTITY
    rule = attach_heads(parse_rule(f"lts:path={tmp_path / 'c'},theta=0.7"))
    assert rule.threshold == pytest.approx(0.3) and parse_rule(rule.spec) == rule
    require_heads_fit(rule, dataclasses.replace(IDENTITY, draft_weights="other"), "arithmetic")
    with pytest.raises(PairError, match="was made for target 'tiny/target'"):
        require_heads_fit(rule, dataclasses.replace(IDENTITY, target_weights="other"), "arithmetic")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    (tmp_path / "c" / "config.json").write_text(json.dumps({**config, "delta": 0.5}))
    with pytest.raises(ReprieveError, match="was changed after they were saved together"):
        LtsCalibration.from_pretrained(tmp_path / "c")
    with pytest.raises(SpecError, match="tolerances must be 1 positive numbers"):
        calibration(tolerances=torch.tensor([0.0]))
    with pytest.raises(SpecError, match="siblings must be one of in_turn, last"):
        LtsRule(siblings="first")


def test_another_embedding_size_is_refused():
    target = tiny_model()
    drafter = DraftModelDrafter(CachedModel(perturbed(target)), CPU)
    decoder = SpeculativeDecoder(CachedModel(target), drafter, NumberTokenizer(), rule=LtsRule.of(calibration()))
    with pytest.raises(SpecError, match="for embeddings of 2, this target's have 32"):
        decoder.generate(PROMPT, SamplingParams(max_new_tokens=8))
