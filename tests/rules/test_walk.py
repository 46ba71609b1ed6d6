"""The acceptance walk on random trees, against a naive implementation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprieve.rules import RiskBudget, Rule, Traits, accept
from reprieve.rules.base import RescueLimits
from reprieve.rules.lossless import BlockCheck, MatchCheck, SampledCheck
from reprieve.types import ROOT, Block, Evidence, Provenance

VOCAB_SIZE = 4


@dataclass(frozen=True)
class GivenRisks(Rule):
    """A rule with given risks."""

    name = "given"

    risks: tuple[float, ...] = ()
    limit: float = 0.5
    replaces: bool = False
    in_turn: bool = False
    most: RescueLimits | None = None

    @property
    def traits(self):
        return Traits(replaces=self.replaces)

    @property
    def limits(self):
        return self.most

    @property
    def rescues_in_turn(self):
        return self.in_turn

    @property
    def threshold(self):
        return self.limit

    def risk(self, evidence):
        return torch.tensor(self.risks, dtype=torch.float64)


@st.composite
def trees(draw, *, chain=False):
    """A block of up to eight nodes whose siblings differ, scores for every place, risks, and draws."""
    parents: list[int] = []
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        parent = len(tokens) - 1 if chain else draw(st.integers(ROOT, len(tokens) - 1))
        taken = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
        if free := [token for token in range(VOCAB_SIZE) if token not in taken]:
            parents.append(parent)
            tokens.append(draw(st.sampled_from(free)))
    num = len(tokens)
    cell = st.integers(-3, 3).map(float)
    scores = draw(
        st.lists(st.lists(cell, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE), min_size=num + 1, max_size=num + 1)
    )
    risk = st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.5, 0.75, 1.0, math.inf, math.nan])
    risks = draw(st.lists(risk, min_size=num, max_size=num))
    unit = st.floats(0.0, 0.999)
    uniforms = draw(st.lists(unit, min_size=num, max_size=num))
    block = Block(torch.tensor(tokens, dtype=torch.long), tuple(parents), deterministic=True)
    return block, torch.tensor(scores), tuple(risks), torch.tensor(uniforms)


def outcome_of(rule, block, check, *, greedy, budget=None):
    evidence = Evidence(
        token_ids=block.token_ids,
        target_logits=check.scores[block.parent_rows],
        greedy=greedy,
        lossless_accepts=check.accepts,
        parents=block.parents,
    )
    checked = check.resolve(block, residual=not rule.traits.replaces)
    return accept(rule, block, evidence, checked, budget=budget or RiskBudget.of(rule)), checked


def naive(rule, block, passes, lossless):
    """The walk as its docstring describes it, for rules without limits."""
    path, kinds, place = [], [], ROOT
    while True:
        children = [node for node in range(block.num_tokens) if block.parents[node] == place]
        within = [n for n in children if rule.risks[n] <= rule.limit and rule.risks[n] < math.inf]
        least = min(within, key=lambda n: (rule.risks[n], n), default=None)
        chosen = None
        if rule.traits.replaces:
            chosen = least
            kind = Provenance.MATCHED if chosen is not None and lossless[chosen] else Provenance.RESCUED
        elif rule.rescues_in_turn:
            chosen = next((n for n in children if passes[n] or n in within), None)
            kind = Provenance.MATCHED if chosen is not None and passes[chosen] else Provenance.RESCUED
        else:
            chosen = next((n for n in children if passes[n]), None)
            kind = Provenance.MATCHED
            if chosen is None:
                chosen, kind = least, Provenance.RESCUED
        if chosen is None:
            return path, kinds
        path.append(chosen)
        kinds.append(kind)
        place = chosen


kinds_of_rule = st.sampled_from([{}, {"in_turn": True}, {"replaces": True}])
limits = st.sampled_from([-math.inf, 0.0, 0.25, 0.5, math.inf])


@settings(max_examples=600)
@given(trees(), kinds_of_rule, limits, st.booleans())
def test_the_walk_equals_the_naive_one(tree, kind, limit, greedy):
    block, scores, risks, uniforms = tree
    rule = GivenRisks(risks, limit, **kind)
    rows = block.parent_rows
    check = (
        MatchCheck(scores, block.token_ids, rows)
        if greedy
        else SampledCheck(
            scores, block.token_ids, rows, uniforms=uniforms, proposal_probs=None, draw=lambda p: p.argmax(-1)
        )
    )
    outcome, checked = outcome_of(rule, block, check, greedy=greedy)
    if limit == -math.inf:
        rule = dataclasses.replace(rule, risks=(math.inf,) * block.num_tokens)
    path, kinds = naive(rule, block, checked.passes.tolist(), checked.accepts.tolist())
    assert outcome.path == path
    assert outcome.provenance == kinds
    assert outcome.token_ids == block.token_ids[path].tolist()
    assert outcome.next_token_id == checked.next_ids[(path[-1] if path else ROOT) + 1]


@given(trees())
def test_the_greedy_lossless_path_is_the_targets_text(tree):
    block, scores, risks, _ = tree
    check = MatchCheck(scores, block.token_ids, block.parent_rows)
    outcome, _ = outcome_of(GivenRisks(risks, -math.inf), block, check, greedy=True)
    place = ROOT
    for node in outcome.path:
        assert block.parents[node] == place
        assert block.token_ids[node] == scores[place + 1].argmax()
        place = node
    assert outcome.next_token_id == scores[place + 1].argmax()
    missed = [node for node in range(block.num_tokens) if block.parents[node] == place]
    assert all(block.token_ids[node] != outcome.next_token_id for node in missed)


@given(trees(chain=True), st.booleans())
def test_a_looser_limit_accepts_no_less_of_a_chain(tree, greedy):
    block, scores, risks, uniforms = tree
    lengths = []
    for limit in (-math.inf, 0.0, 0.25, 0.5, 1.0):
        check = (
            MatchCheck(scores, block.token_ids, block.parent_rows)
            if greedy
            else SampledCheck(
                scores,
                block.token_ids,
                block.parent_rows,
                uniforms=uniforms,
                proposal_probs=None,
                draw=lambda p: p.argmax(-1),
            )
        )
        lengths.append(len(outcome_of(GivenRisks(risks, limit), block, check, greedy=greedy)[0].path))
    assert lengths == sorted(lengths)


@settings(max_examples=400)
@given(trees(), st.integers(0, 2), st.sampled_from([0.3, 0.8, 10.0]))
def test_limits_hold_in_every_block(tree, most, allowance):
    block, scores, risks, _ = tree
    rule = GivenRisks(risks, math.inf, most=RescueLimits(most, allowance))
    budget = RiskBudget.of(rule)
    check = MatchCheck(scores, block.token_ids, block.parent_rows)
    outcome, _ = outcome_of(rule, block, check, greedy=True, budget=budget)
    rescued = [node for node, kind in zip(outcome.path, outcome.provenance, strict=True) if kind is Provenance.RESCUED]
    spent = sum(risks[node] for node in rescued)
    assert len(rescued) == outcome.num_rescued <= most
    assert spent <= allowance
    assert math.isclose(budget.left, allowance - spent, abs_tol=1e-9)


@given(trees(chain=True))
def test_joint_verification_accepts_a_prefix(tree):
    """Its average gain over token-wise verification and its distribution are tested elsewhere."""
    block, scores, _, uniforms = tree
    check = BlockCheck(
        scores, block.token_ids, block.parent_rows, uniforms=uniforms, proposal_probs=None, draw=lambda p: p.argmax(-1)
    )
    passes = check.resolve(block).passes.tolist()
    assert passes == sorted(passes, reverse=True)
