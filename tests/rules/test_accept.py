"""The acceptance walk, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reprieve.rules import RiskBudget, accept, parse_rule
from reprieve.rules.lossless import MatchCheck, block_verification
from reprieve.rules.top_k import TopKRule
from reprieve.types import ROOT, Block, Evidence, Provenance

M, R = Provenance.MATCHED, Provenance.RESCUED


class InTurn(TopKRule):
    rescues_in_turn = True


def walk(spec, probs, tokens, parents=None, budget=None):
    """Greedy acceptance over hand-made probabilities; row 0 judges what follows the last committed token."""
    block = Block(torch.tensor(tokens), tuple(range(-1, len(tokens) - 1)) if parents is None else parents)
    rows = torch.tensor(probs).log()
    judged = rows[torch.tensor(block.parents) + 1]
    check = MatchCheck(rows, block.token_ids, block.parent_rows)
    evidence = Evidence(
        token_ids=block.token_ids,
        target_logits=judged,
        greedy=True,
        lossless_accepts=check.accepts,
        parents=block.parents,
    )
    rule = parse_rule(spec) if isinstance(spec, str) else spec
    return accept(rule, block, evidence, check.resolve(block), budget=budget or RiskBudget.of(rule))


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


def test_a_tree_prefers_a_match_to_a_rescue_and_the_least_risk_among_rescues():
    tokens, parents = [1, 0, 2, 1, 2], (ROOT, ROOT, 1, 1, 0)
    rows = [[0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.5, 0.2, 0.3], *[[0.7, 0.2, 0.1]] * 3]
    outcome = walk("top_k:k=3", rows, tokens, parents)
    assert outcome.path == [1, 2], "node 1 matches; below it node 2 (rank 2) beats node 3 (rank 3)"
    assert outcome.provenance == [M, R]
    assert walk("lossless", rows, tokens, parents).path == [1]
    rescued = walk("top_k:k=2", [[0.3, 0.1, 0.6], *rows[1:]], tokens, parents)
    assert rescued.path == [1, 2], "no root matches: the root of rank 2 is rescued, then its child of rank 2"


def test_rescuing_in_turn_considers_each_child_before_checking_the_next():
    tokens, parents = [1, 0], (ROOT, ROOT)
    rows = [[0.6, 0.3, 0.1]] * 3
    for in_turn, path, kind in ((False, [1], M), (True, [0], R)):
        rule = InTurn(k=2) if in_turn else parse_rule("top_k:k=2")
        outcome = walk(rule, rows, tokens, parents)
        assert (outcome.path, outcome.provenance) == (path, [kind])
    assert walk(InTurn(k=1), rows, tokens, parents).path == [1], "refused by the rule too: the next child is checked"


def test_limits_apply_per_block_and_per_answer():
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
    checked = MatchCheck(rows, block.token_ids, block.parent_rows).resolve(block)
    outcome = accept(parse_rule("fuzzy:threshold=0.05"), block, evidence, checked, budget=RiskBudget())
    assert outcome.path == [0]
    assert outcome.next_token_id == 0


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
