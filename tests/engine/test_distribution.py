"""Sampled lossless decoding preserves the target's distribution: chi-square tests over answers."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from reprieve.drafters import DraftModelDrafter, EagleDrafter, EagleSettings
from reprieve.drafters.length import AcceptanceLength, LearnedLength
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request
from reprieve.models.cached_model import CachedModel, StepCosts
from reprieve.rules import parse_rule
from reprieve.types import ROOT, Block, Provenance
from tests.kit.tiny import NumberTokenizer, ScriptedDrafter, perturbed, random_eagle, random_length, tiny_model

M, R = Provenance.MATCHED, Provenance.RESCUED


CPU = torch.device("cpu")


def counts_of(decode, num_answers, vocab_size, length):
    """Count each text of `length` tokens over `num_answers` seeds."""
    counts = np.zeros(vocab_size**length)
    for seed in range(num_answers):
        index = 0
        for token in decode(seed)[:length]:
            index = index * vocab_size + token
        counts[index] += 1
    return counts


def exact_probs(model, prompt, length, params):
    """The target's own probability of every text, under temperature, top-k and top-p."""
    from reprieve.models.sampling import Sampler

    sampler = Sampler(params, CPU)
    size = model.config.vocab_size
    texts = [()]
    probs = np.ones(1)
    for _ in range(length):
        with torch.no_grad():
            logits = torch.stack([model(torch.tensor([[*prompt, *text]])).logits[0, -1] for text in texts])
        step = sampler.target_scores(logits).softmax(-1).numpy()
        probs = (probs[:, None] * step).reshape(-1)
        texts = [(*text, token) for text in texts for token in range(size)]
    return probs


def tree_of_samples(draft, iid):
    """Two children at each of two levels: drawn from the draft, or its two best (deterministic)."""

    @functools.cache
    def row_of(text):
        with torch.no_grad():
            return draft(torch.tensor([text])).logits[0, -1]

    def script(drafter):
        def propose(committed, max_depth):
            tokens, parents, logits = [], [], []
            frontier = [(ROOT, tuple(committed))]
            for _ in range(min(2, max_depth)):
                following = []
                for parent, text in frontier:
                    row = row_of(text)
                    if iid:
                        chosen = [int(drafter.sampler.draft_token(row[None])) for _ in range(2)]
                    else:
                        chosen = row.topk(2).indices.tolist()
                    for token in chosen:
                        tokens.append(token)
                        parents.append(parent)
                        logits.append(row)
                        following.append((len(tokens) - 1, (*text, token)))
                frontier = following
            return Block(torch.tensor(tokens), tuple(parents), torch.stack(logits), deterministic=not iid)

        return propose

    drafter = ScriptedDrafter(lambda *_: Block.empty())
    drafter.script = script(drafter)
    return drafter


def eagle_drafter(target, *, prune=False):
    """Dynamic trees of an untrained EAGLE-3 head over three of the four tokens."""
    pruning = dict(prune="entropy", epsilon=0.3) if prune else {}
    head = random_eagle(target, draft_vocab_size=3)
    return EagleDrafter(head, vocab_size=4, settings=EagleSettings(depth=2, top_k=2, total_tokens=5, **pruning))


EAGLES = ("eagle3", "eagle3, pruned", "eagle3, weighed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafting",
    [
        "chain", "greedy chain", "block", "exact", "tree, iid", "tree, best", "eagle3", "eagle3, pruned",
        "eagle3, weighed", "learned length", "block, learned length",
    ],
)  # fmt: skip
def test_sampled_lossless_preserves_the_targets_distribution(drafting):
    """Chi-square over all texts of three tokens from a vocabulary of four; seeded, so it is deterministic."""
    size, length = 4, 3
    learned, eagle = drafting.endswith("learned length"), drafting.startswith("eagle3")
    num_answers = 800 if eagle else 1500 if learned else 1000 if drafting == "tree, iid" else 750
    target = tiny_model(seed=3, vocab_size=size, scale=5.0)
    # A draft this far away shows a wrong residual of blocks and trees in few answers.
    draft = perturbed(target, noise=0.12 if learned else 0.2)
    prompt = [1, 2, 3, 0]
    params = SamplingParams(max_new_tokens=length, temperature=1.3, top_k=3, top_p=0.97)
    if drafting == "greedy chain":
        params = SamplingParams(max_new_tokens=length, temperature=1.3, top_k=3, top_p=0.97, draft_temperature=0.0)
    if drafting.startswith("eagle3"):
        drafter = eagle_drafter(target, prune="pruned" in drafting)
    elif "tree" in drafting:
        drafter = tree_of_samples(draft, iid="iid" in drafting)
    else:
        drafter = DraftModelDrafter(CachedModel(draft, hidden_layers=(-1,)), CPU, hidden_layers=())
    verification = drafting.partition(",")[0]
    rule = parse_rule(f"lossless:verification={verification}" if verification in ("block", "exact") else "lossless")
    cached = CachedModel(target, hidden_layers=drafter.target_layers)
    decoder = SpeculativeDecoder(cached, drafter, NumberTokenizer(size), rule=rule, num_draft_tokens=3)
    if drafting == "eagle3, weighed":
        decoder.draft_length = AcceptanceLength(StepCosts(0.3, 0.03), drafts_trees=True)
    if drafting.endswith("learned length"):  # it reads the sampled token
        decoder.draft_length = LearnedLength(random_length(32, seed=5))
    num_rescued, lengths = 0, Counter()

    def decode(seed):
        nonlocal num_rescued
        made = decoder.generate(prompt, dataclasses.replace(params, seed=seed))
        num_rescued += made.num_rescued
        lengths[made.num_drafted] += 1
        return made.token_ids

    counts = counts_of(decode, num_answers, size, length)
    if drafting.endswith("learned length"):
        assert lengths.most_common(2)[1][1] > num_answers / 10, "it must have stopped some blocks, and not others"
    assert num_rescued == 0, "lossless rescues nothing, on trees neither"
    assert_follows(counts, exact_probs(target, prompt, length, params))


@pytest.mark.parametrize("draft_temperature", [None, 0.0])
def test_sampled_lossless_batches_preserve_the_targets_distribution(draft_temperature):
    size, length, num_answers = 4, 3, 3000
    target = tiny_model(seed=3, vocab_size=size, scale=5.0)
    pair = Pair(target, perturbed(target, noise=0.12), NumberTokenizer(size), "t", "d")
    prompt = [1, 2, 3, 0]
    params = SamplingParams(
        max_new_tokens=length, temperature=1.3, top_k=3, top_p=0.97, draft_temperature=draft_temperature
    )
    rule = parse_rule("lossless")
    decoder = BatchedSpeculativeDecoder(pair, num_rows=250, num_draft_tokens=3, params=params, rules=[rule])
    made = []
    for seed in range(num_answers):
        decoder.submit(Request(prompt, rule, length, made.append, seed=seed))
    while not decoder.idle:
        decoder.step()
    counts = counts_of(lambda number: made[number].token_ids, num_answers, size, length)
    assert sum(answer.num_rescued for answer in made) == 0
    assert_follows(counts, exact_probs(target, prompt, length, params))


def assert_follows(counts, probs):
    """Check counts of texts against their probabilities, by a chi-square test over those that are common enough."""
    expected = probs * counts.sum()
    assert counts[expected == 0].sum() == 0, "no text the target excludes"
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert len(wanted) >= 8, "too few texts to test anything"
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 0.01


@pytest.mark.slow
def test_a_relaxed_rule_fails_the_same_chi_square():
    """A control for the test above: rescuing changes the distribution, and the same statistic detects it."""
    size = 4
    target = tiny_model(seed=3, vocab_size=size, scale=5.0)
    drafter = DraftModelDrafter(CachedModel(perturbed(target, noise=0.5)), CPU)
    decoder = SpeculativeDecoder(
        CachedModel(target), drafter, NumberTokenizer(size), rule=parse_rule("top_k:k=3"), num_draft_tokens=3
    )
    counts = counts_of(
        lambda seed: (
            decoder.generate([1, 2, 3, 0], SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed)).token_ids
        ),
        300,
        size,
        1,
    )
    expected = exact_probs(target, [1, 2, 3, 0], 1, SamplingParams(temperature=1.0)) * 300
    assert chisquare(counts, expected * counts.sum() / expected.sum()).pvalue < 1e-6
