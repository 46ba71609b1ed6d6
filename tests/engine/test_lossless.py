"""Lossless decoding equals the target's, for every architecture, drafter and K, on chains and trees."""

from __future__ import annotations

import functools

import pytest
import torch

from reprieve.drafters import DraftModelDrafter, NgramDrafter
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.models.cached_model import CachedModel
from reprieve.models.direct import DirectCache
from reprieve.types import ROOT, Block
from tests.kit.tiny import ARCHITECTURES, NumberTokenizer, ScriptedDrafter, perturbed, tiny_model

PROMPT = list(range(2, 22))
CPU = torch.device("cpu")


def target_greedy(model, prompt, num_tokens):
    output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


@functools.cache
def models_of(kind):
    """Target, draft, and the target's own answer."""
    target = tiny_model(kind)
    return target, perturbed(target), target_greedy(target, PROMPT, 40)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 16])
def test_lossless_greedy_equals_the_target_token_for_token(kind, num_draft_tokens):
    target, draft, expected = models_of(kind)
    assert len(set(expected)) > 3, "a model that repeats one token proves nothing"
    for drafter in (DraftModelDrafter(CachedModel(draft), CPU), NgramDrafter(CPU), None):
        decoder = SpeculativeDecoder(CachedModel(target), drafter, NumberTokenizer(), num_draft_tokens=num_draft_tokens)
        for _ in range(2):  # the second answer starts from used caches
            answer = decoder.generate(PROMPT, SamplingParams(max_new_tokens=40))
            assert answer.token_ids == expected
            assert answer.finish_reason == "length"


def tree_script(model):
    """Draft the target's next three tokens, each with a wrong sibling that has a child."""

    def script(committed, max_depth):
        depth = min(4, max_depth)
        true = target_greedy(model, committed, depth)
        tokens, parents, right = [], [], ROOT
        for place in range(depth):
            wrong = (true[place] + 1) % model.config.vocab_size
            last = place == 3  # nothing is right at depth 4
            tokens += [wrong, (wrong + 1) % model.config.vocab_size, (wrong + 2) if last else true[place]]
            parents += [right, len(tokens) - 3, right]
            tokens[-1] %= model.config.vocab_size
            right = len(tokens) - 1
        return Block(torch.tensor(tokens), tuple(parents), deterministic=True)

    return script


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_trees_equal_the_target_and_take_the_best_branch(kind):
    target = tiny_model(kind)
    expected = target_greedy(target, PROMPT, 40)
    drafter = ScriptedDrafter(tree_script(target))
    decoder = SpeculativeDecoder(CachedModel(target), drafter, NumberTokenizer())
    answer = decoder.generate(PROMPT, SamplingParams(max_new_tokens=40))
    assert answer.token_ids == expected
    assert drafter.outcomes[0].path == [2, 5, 8]
    assert answer.tokens_per_round == pytest.approx(4.0)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_cache_after_rollback_equals_a_fresh_prefill(kind):
    target = tiny_model(kind)
    decoder = SpeculativeDecoder(CachedModel(target), ScriptedDrafter(tree_script(target)), NumberTokenizer())
    answer = decoder.generate(PROMPT, SamplingParams(max_new_tokens=23))
    used = decoder.target
    text = [*PROMPT, *answer.token_ids]
    assert used.cached_ids == text[: used.length]
    fresh = CachedModel(target)
    with torch.inference_mode():
        fresh.start(text[: used.length])
    torch.testing.assert_close(kept(used.cache), kept(fresh.cache), rtol=1e-4, atol=1e-5)


def kept(cache):
    """Keys and values of all layers."""
    if isinstance(cache, DirectCache):
        return cache.buffer[..., : cache.length, :]
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])


def test_tree_logits_equal_separate_forwards_of_each_branch():
    for kind in ARCHITECTURES:
        target = tiny_model(kind)
        model = CachedModel(target)
        block = Block(torch.tensor([5, 6, 7, 8, 9]), (ROOT, 0, ROOT, 0, 3))
        with torch.inference_mode():
            model.start(PROMPT)
            logits, _ = model.forward([30, 5, 6, 7, 8, 9], block)
            for branch, rows in (((5, 6), (1, 2)), ((7,), (3,)), ((5, 8, 9), (1, 4, 5))):
                plain = target(torch.tensor([[*PROMPT, 30, *branch]])).logits[0]
                expected = plain[-len(branch) :]
                torch.testing.assert_close(logits[list(rows)], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("drafting", ["nothing", "n-grams", "a draft"])
def test_the_prompt_is_read_with_the_first_verification(drafting, target, monkeypatch):
    forwards, run = [], CachedModel._run

    def counted(self, token_ids, **options):
        forwards.append((self, len(token_ids)))
        return run(self, token_ids, **options)

    monkeypatch.setattr(CachedModel, "_run", counted)
    drafter = {"nothing": None, "n-grams": NgramDrafter(CPU), "a draft": DraftModelDrafter(CachedModel(target), CPU)}
    decoder = SpeculativeDecoder(CachedModel(target), drafter[drafting], NumberTokenizer(), num_draft_tokens=3)
    made = decoder.generate(PROMPT, SamplingParams(max_new_tokens=12))
    read = [num for model, num in forwards if model is decoder.target]
    assert len(read) == made.num_rounds, "a forward a round, and none before"
    assert len(PROMPT) <= read[0] <= len(PROMPT) + 3
    assert decoder.target.cached_ids == [*PROMPT, *made.token_ids][: decoder.target.length]
