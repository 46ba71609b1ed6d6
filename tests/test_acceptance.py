"""The acceptance walk: which nodes, which provenance, which limits, and the distribution it leaves behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from reprieve.drafters import DraftModelDrafter, EagleDrafter, EagleSettings
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.models import CachedModel
from reprieve.rules import RiskBudget, Traits, accept, parse_rule
from reprieve.rules.checks import GreedyCheck
from reprieve.rules.lossless import block_verification
from reprieve.rules.top_k import TopKRule
from reprieve.types import ROOT, Block, Evidence, Provenance

from .tiny import NumberTokenizer, ScriptedDrafter, perturbed, random_eagle, tiny_model

M, R = Provenance.MATCHED, Provenance.RESCUED
CPU = torch.device("cpu")


class InTurn(TopKRule):
    own_traits = Traits(rescues_in_turn=True)


def walk(spec, probs, tokens, parents=None, **keywords):
    """Greedy acceptance over hand-made probabilities; row 0 judges what follows the last committed token."""
    block = Block(torch.tensor(tokens), tuple(range(-1, len(tokens) - 1)) if parents is None else parents)
    rows = torch.tensor(probs).log()
    judged = rows[torch.tensor(block.parents) + 1]
    check = GreedyCheck(rows, block.token_ids, block.parent_rows)
    evidence = Evidence(
        token_ids=block.token_ids,
        target_logits=judged,
        greedy=True,
        lossless_accepts=check.accepts,
        parents=block.parents,
    )
    rule = parse_rule(spec) if isinstance(spec, str) else spec
    budget = keywords.pop("budget", RiskBudget.of(rule))
    return accept(rule, block, evidence, check.settle(block), budget=budget, **keywords)


CHAIN = [[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]


def test_exact_pattern_of_a_chain():
    outcome = walk("lossless", CHAIN, [0, 1, 1])
    assert (outcome.path, outcome.next_token_id) == ([0], 0), "stops at the mismatch, falls back to the argmax"
    outcome = walk("top_k:k=2", CHAIN, [0, 1, 1])
    assert outcome.path == [0, 1, 2]
    assert outcome.provenance == [M, R, M]
    assert outcome.next_token_id == 2, "the bonus token follows the last drafted one"
    assert outcome.risks == [1.0, 2.0, 1.0]
    assert walk("top_k:k=2", CHAIN, [0, 2, 1]).path == [0]


def test_a_request_can_bring_its_own_threshold():
    assert walk("top_k:k=2", CHAIN, [0, 2, 1], threshold=3.0).path == [0, 1, 2]
    assert walk("top_k:k=3", CHAIN, [0, 1, 1], threshold=1.0).path == [0]


def test_a_tree_prefers_a_match_to_a_rescue_and_the_least_risk_among_rescues():
    tokens, parents = [1, 0, 2, 1, 2], (ROOT, ROOT, 1, 1, 0)
    rows = [[0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.5, 0.2, 0.3], *[[0.7, 0.2, 0.1]] * 3]
    outcome = walk("top_k:k=3", rows, tokens, parents)
    assert outcome.path == [1, 2], "node 1 matches; below it node 2 (rank 2) beats node 3 (rank 3)"
    assert outcome.provenance == [M, R]
    assert walk("lossless", rows, tokens, parents).path == [1]
    rescued = walk("top_k:k=2", [[0.3, 0.1, 0.6], *rows[1:]], tokens, parents)
    assert rescued.path == [1, 2], "no root matches: the root of rank 2 is rescued, then its child of rank 2"


def test_a_rule_that_rescues_in_turn_asks_about_each_child_before_the_next_is_checked():
    tokens, parents = [1, 0], (ROOT, ROOT)
    rows = [[0.6, 0.3, 0.1]] * 3
    for in_turn, path, kind in ((False, [1], M), (True, [0], R)):
        rule = InTurn(k=2) if in_turn else parse_rule("top_k:k=2")
        outcome = walk(rule, rows, tokens, parents)
        assert (outcome.path, outcome.provenance) == (path, [kind])
    assert walk(InTurn(k=1), rows, tokens, parents).path == [1], "refused by the rule too: the next child is checked"


def test_limits_a_block_and_an_answer():
    probs = [[0.6, 0.4]] * 5
    tokens = [1, 1, 1, 1]
    gap = float(np.log(0.6 / 0.4))
    assert walk("asd:regret=1,per_block=2,budget=10", probs, tokens).path == [0, 1]
    assert walk("asd:regret=1,per_block=none,budget=10", probs, tokens).path == [0, 1, 2, 3]
    budget = RiskBudget(3.5 * gap)
    assert walk("asd:regret=1,per_block=none,budget=10", probs, tokens, budget=budget).path == [0, 1, 2]
    assert budget.left == pytest.approx(0.5 * gap), "what was rescued is paid for"
    assert walk("asd:regret=1,per_block=none,budget=10", probs, tokens, budget=budget).path == []


def test_replacing_rule_may_refuse_a_match():
    rows = torch.tensor(CHAIN).log()
    block = Block.chain(torch.tensor([0, 0, 1]))
    draft = torch.tensor([CHAIN[0], [0.98, 0.01, 0.01], CHAIN[2]]).log()
    evidence = Evidence(block.token_ids, rows[:-1], True, torch.tensor([True] * 3), draft_scores=draft)
    checked = GreedyCheck(rows, block.token_ids, block.parent_rows).settle(block)
    outcome = accept(parse_rule("fuzzy:threshold=0.05"), block, evidence, checked, budget=RiskBudget())
    assert outcome.path == [0]
    assert outcome.next_token_id == 0


def counts_of(decode, num_answers, vocab_size, length):
    """How often each text of `length` tokens comes out."""
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

    def script(drafter):
        def propose(committed, max_depth):
            tokens, parents, logits = [], [], []
            frontier = [(ROOT, list(committed))]
            for _ in range(min(2, max_depth)):
                following = []
                for parent, text in frontier:
                    with torch.no_grad():
                        row = draft(torch.tensor([text])).logits[0, -1]
                    if iid:
                        chosen = [int(drafter.sampler.draft_token(row[None])) for _ in range(2)]
                    else:
                        chosen = row.topk(2).indices.tolist()
                    for token in chosen:
                        tokens.append(token)
                        parents.append(parent)
                        logits.append(row)
                        following.append((len(tokens) - 1, [*text, token]))
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


@pytest.mark.parametrize(
    "drafting",
    ["chain", "greedy chain", "block", "exact", "tree, iid", "tree, best", "eagle3", "eagle3, pruned"],
)
def test_sampled_lossless_leaves_the_targets_distribution(drafting):
    """Chi-square over all texts of three tokens of a vocabulary of four; seeded, so it cannot flicker."""
    size, length = 4, 3
    num_answers = 1200 if drafting.startswith("eagle3") else 3000  # a head's trees take several forwards each
    target = tiny_model(seed=3, vocab_size=size, scale=5.0)
    draft = perturbed(target, noise=0.12)
    prompt = [1, 2, 3, 0]
    params = SamplingParams(max_new_tokens=length, temperature=1.3, top_k=3, top_p=0.97)
    if drafting == "greedy chain":
        params = SamplingParams(max_new_tokens=length, temperature=1.3, top_k=3, top_p=0.97, draft_temperature=0.0)
    if drafting.startswith("eagle3"):
        drafter = eagle_drafter(target, prune="pruned" in drafting)
    elif "tree" in drafting:
        drafter = tree_of_samples(draft, iid="iid" in drafting)
    else:
        drafter = DraftModelDrafter(CachedModel(draft), CPU)
    rule = parse_rule(f"lossless:verification={drafting}" if drafting in ("block", "exact") else "lossless")
    cached = CachedModel(target, hidden_layers=drafter.target_layers)
    decoder = SpeculativeDecoder(cached, drafter, NumberTokenizer(size), rule=rule, num_draft_tokens=3)
    num_rescued = 0

    def decode(seed):
        nonlocal num_rescued
        made = decoder.generate(prompt, dataclasses.replace(params, seed=seed))
        num_rescued += made.num_rescued
        return made.token_ids

    counts = counts_of(decode, num_answers, size, length)
    assert num_rescued == 0, "lossless rescues nothing, on trees neither"
    expected = exact_probs(target, prompt, length, params) * num_answers
    assert counts[expected == 0].sum() == 0, "no text the target excludes"
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert len(wanted) >= 8, "too few texts to test anything"
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 0.01


def test_a_relaxed_rule_fails_the_same_chi_square():
    """The test above can fail: rescuing changes the distribution, and the same statistic sees it."""
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
        1500,
        size,
        1,
    )
    expected = exact_probs(target, [1, 2, 3, 0], 1, SamplingParams(temperature=1.0)) * 1500
    assert chisquare(counts, expected * counts.sum() / expected.sum()).pvalue < 1e-6


def test_block_verification_accepts_at_least_as_much_as_token_wise():
    generator = torch.Generator().manual_seed(0)
    token_wise = block_wise = 0
    for _ in range(4000):
        target = torch.randn(4, 5, generator=generator).softmax(-1)
        proposal = torch.randn(4, 5, generator=generator).softmax(-1)
        tokens = torch.multinomial(proposal, 1, generator=generator).squeeze(-1)
        uniforms = torch.rand(4, generator=generator)
        block_wise += block_verification(target, proposal, tokens, uniforms)[0]
        ratio = target.gather(1, tokens[:, None]) / proposal.gather(1, tokens[:, None])
        token_wise += int((uniforms < ratio.squeeze(1)).long().cumprod(0).sum())
    assert block_wise > 1.02 * token_wise
