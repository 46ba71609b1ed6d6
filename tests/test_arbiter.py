"""CoSpec: the arbiter's mask and cache, its rule in the loop, every formula of its training by hand, and the audit."""

import dataclasses
import json
import math

import pytest
import torch

from reprieve.drafters import DraftModelDrafter, NgramDrafter
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.engine.advisors import ArbiterAdvisor, build_arbiter, make_advisor
from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.evaluation.branches import diagnose
from reprieve.heads.arbiter import Arbiter
from reprieve.heads.loading import attach_heads, require_heads_fit
from reprieve.heads.settings import ArbiterShape
from reprieve.metrics import BranchChoices
from reprieve.models import CachedModel
from reprieve.models.arbiter import ArbiterModel, ArbitrationRound, CachedArbiter, Layout, hybrid_mask
from reprieve.rules import accepts, parse_rule
from reprieve.rules.arbiter import ArbiterRule
from reprieve.training.rewards import (
    Decision,
    Rewards,
    Rollout,
    RolloutRound,
    clipped_objective,
    policy_divergence,
    policy_entropy,
    warm_up_loss,
)
from reprieve.training.rollouts import SampledArbiterRule, rollout_of
from reprieve.types import Evidence, Provenance

from .mining import LastWordTask, problem
from .tiny import ARCHITECTURES, IDENTITY, NumberTokenizer, perturbed, random_eagle, tiny_model, with_heads

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def trained(draft, *, seed=0, bias=0.0, **shape) -> ArbiterModel:
    """An arbiter with random adapters that do something."""
    model = ArbiterModel(draft, ArbiterShape(**shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.own_tensors.items():
            if "lora_B" in name or name == "head.weight":
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        model.head.bias.fill_(bias)
    return model


def arbiter_of(model, *, threshold=0.6, pair=IDENTITY) -> Arbiter:
    return Arbiter(dict(model.own_tensors), model.shape, threshold, 4, pair=pair, task="arithmetic")


def decoder_with(target, draft, rule, advisor, *, k=4):
    return SpeculativeDecoder(
        CachedModel(target),
        DraftModelDrafter(CachedModel(draft), CPU),
        NumberTokenizer(),
        rule=rule,
        num_draft_tokens=k,
        advisor=advisor,
    )


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def draft(target):
    return perturbed(target, noise=0.03)


# ---- the network ----


def test_the_mask_by_hand():
    """Three context tokens, a round after two of them, one after all three; K = 1, so a region of five."""
    parts = [Layout.context(0, 3)]
    parts += [Layout.region(number, ArbitrationRound(length, [7], [8])) for number, length in enumerate((2, 3))]
    layout = Layout.join(parts)
    seen = hybrid_mask(layout, layout).int()
    assert seen[:3, :3].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]], "the context attends causally"
    assert seen[:3, 3:].sum() == 0, "nothing flows back into it"
    for row in seen[3:8]:
        assert row.tolist() == [1, 1, 0] + [1] * 5 + [0] * 5, "its own context and all of itself"
    for row in seen[8:]:
        assert row.tolist() == [1, 1, 1] + [0] * 5 + [1] * 5
    causal = hybrid_mask(layout, layout, hybrid=False).int()
    assert causal[3:8, 3:8].tolist() == torch.ones(5, 5).tril().tolist()
    assert causal[3:8, :3].tolist() == seen[3:8, :3].tolist()
    assert layout.positions.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7]
    windowed = hybrid_mask(layout, layout, window=2).int()
    assert windowed[8].tolist() == [0, 0, 1] + [0] * 5 + [1, 1, 0, 0, 0], "positions less than two away, on both sides"


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_rounds_judged_together_alone_and_from_the_cache_are_one(kind):
    draft = tiny_model(kind)
    model = trained(draft)
    generator = torch.Generator().manual_seed(1)

    def draw(size):
        return torch.randint(0, 48, (size,), generator=generator).tolist()

    context = draw(30)
    rounds = [ArbitrationRound(length, draw(k), draw(k)) for length, k in ((12, 4), (17, 4), (18, 2), (30, 4))]
    cached = CachedArbiter(model)
    cached.start(context[:12], num_positions=41)
    before, num_read = 12, 0
    with torch.no_grad():
        together = model.judge(context, rounds)
        for asked, logits in zip(rounds, together, strict=True):
            cached.commit(context[before : asked.context_length])
            found = cached.judge(asked.draft_ids, asked.target_ids)
            alone = model.judge(context[: asked.context_length], [asked])[0]
            torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(alone, logits, rtol=1e-3, atol=1e-3)
            num_new = asked.context_length - (before if num_read else 0)
            assert cached.num_read - num_read == num_new + 2 * len(asked.draft_ids) + 3, "the context is read once"
            before, num_read = asked.context_length, cached.num_read
    assert together[0].std() > 0


def test_the_hybrid_mask_lets_drafted_tokens_see_the_targets_and_the_causal_one_does_not(draft):
    asked, changed = (ArbitrationRound(8, [10, 11, 12], [10, 20, last]) for last in (12, 30))
    for hybrid, sees in ((True, True), (False, False)):
        model = trained(draft, hybrid=hybrid)
        with torch.no_grad():
            first, second = (model.judge(PROMPT, [item])[0] for item in (asked, changed))
        assert (first[0] != second[0]).item() is sees


def test_weights_are_shared_and_the_draft_is_left_as_it_was(draft):
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        before = draft(tokens).logits
        model = trained(draft)
        assert torch.equal(draft(tokens).logits, before), "adapters of the arbiter must not touch the draft"
    held = {parameter.data_ptr() for parameter in draft.parameters()}
    base = [p for name, p in model.named_parameters() if not p.requires_grad]
    assert base and all(parameter.data_ptr() in held for parameter in base), "no weight of the draft is held twice"
    assert all("lora_" in name or name in ("separator", "head.weight", "head.bias") for name in model.own_tensors)
    rank = {t.shape[0] for name, t in model.own_tensors.items() if "lora_A" in name}
    assert rank == {16}, "the paper's"


def test_gradients_reach_adapters_separator_and_head_only(draft):
    model = trained(draft)
    model.judge(PROMPT, [ArbitrationRound(8, [1, 2], [3, 4])])[0].sum().backward()
    assert all(tensor.grad is not None and bool(tensor.grad.abs().sum() > 0) for tensor in model.own_tensors.values())
    assert all(parameter.grad is None for parameter in draft.parameters())


def test_bad_shapes_and_rounds_are_refused(draft):
    for bad, told in ((dict(rank=0), "rank must be 1 or more"), (dict(dropout=1.0), r"dropout must be in \[0, 0.9\]")):
        with pytest.raises(SpecError, match=told):
            ArbiterShape(**bad)
    with pytest.raises(SpecError, match="must pair each drafted token"):
        ArbitrationRound(3, [1, 2], [1])
    model = ArbiterModel(draft, ArbiterShape())
    with pytest.raises(SpecError, match=r"do not fit this draft: check head\.bias"):
        model.load_own({name: t for name, t in model.own_tensors.items() if name != "head.bias"})
    with pytest.raises(SpecError, match=r"separator must have shape \[32\]"):
        model.load_own({**model.own_tensors, "separator": torch.zeros(3)})


def test_an_arbiter_is_saved_bound_to_its_pair(tmp_path, draft):
    made = arbiter_of(trained(draft), threshold=0.7)
    made.save_pretrained(tmp_path / "a")
    again = Arbiter.from_pretrained(tmp_path / "a")
    assert again.fingerprint == made.fingerprint and again.shape == made.shape and again.num_draft_tokens == 4
    rule = attach_heads(parse_rule(f"arbiter:path={tmp_path / 'a'}"))
    assert rule.lambda_ == 0.7, "its own recommendation"
    assert parse_rule(rule.spec) == rule and "lambda=0.7" in rule.spec
    require_heads_fit(rule, IDENTITY, "arithmetic")
    for name in ("draft_weights", "target_weights", "tokenizer"):
        with pytest.raises(PairError, match="was made for target 'tiny/target'"):
            require_heads_fit(rule, dataclasses.replace(IDENTITY, **{name: "other"}), "arithmetic")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps({**config, "threshold": 0.1}))
    with pytest.raises(ReprieveError, match="not as they were saved together"):
        Arbiter.from_pretrained(tmp_path / "a")


# ---- the rule, in the loop ----


def test_the_rule_by_hand():
    seen = Evidence(
        token_ids=torch.tensor([5, 6, 7, 8]),
        target_logits=torch.zeros(4, 10),
        greedy=True,
        lossless_accepts=torch.tensor([True, False, False, False]),
        advice=torch.tensor([1.0, 0.61, 0.59, 1.0]),
    )
    tie = dataclasses.replace(seen, advice=torch.tensor([1.0, 0.5, 0.25, 0.0]))
    rule = ArbiterRule.of(Arbiter({}, ArbiterShape(), 0.6, 4, pair=IDENTITY, task="arithmetic"))
    assert accepts(rule, seen).tolist() == [True, True, False, True]
    assert accepts(rule.with_dial(0.5), seen).tolist() == [True] * 4
    assert accepts(rule.with_dial(0.5), tie).tolist() == [True, False, False, False], "Eq. 17: more than lambda"
    assert accepts(rule.with_dial(0.25), tie).tolist() == [True, True, False, False]
    assert accepts(rule.with_dial(0.0), tie).tolist() == [True] * 4
    assert accepts(rule.with_dial(1.0), seen).tolist() == [True, False, False, False], "certain, and rejected still"
    with pytest.raises(SpecError, match=r"lambda must be in \[0, 1\], got 1.5"):
        parse_rule("arbiter:lambda=1.5")
    with pytest.raises(SpecError, match="has no parameter 'threshold'; it takes lambda, path"):
        parse_rule("arbiter:threshold=0.5")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lambda_one_is_lossless_and_lambda_zero_takes_the_whole_draft(target, draft, temperature):
    model = trained(draft, bias=0.0)
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=3)

    def answer(rule):
        advisor = None if rule.name == "lossless" else ArbiterAdvisor(model)
        return decoder_with(target, draft, rule, advisor).generate(PROMPT, params)

    exact = answer(parse_rule("lossless:verification=exact"))
    arbiter = arbiter_of(model)
    strict = answer(ArbiterRule.of(arbiter, lambda_=1.0))
    assert strict.token_ids == exact.token_ids and strict.num_rescued == 0
    loose = answer(ArbiterRule.of(arbiter, lambda_=0.0))
    assert set(loose.round_lengths[:-1]) == {5}, "K drafted tokens and the bonus, every round"
    if temperature == 0.0:
        alone = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer()).generate(PROMPT, params)
        assert exact.token_ids == alone.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_matches_appendix_f(target, draft, temperature):
    """Matched tokens pass, mismatches pass above lambda, the first one refused commits the target's own token."""
    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    made = decoder_with(target, draft, rule, ArbiterAdvisor(model)).generate(
        PROMPT, SamplingParams(max_new_tokens=80, temperature=temperature, seed=1), trace=True
    )
    context, kinds = list(PROMPT), set()
    for traced in made.trace[:-1]:
        asked = ArbitrationRound(len(context), traced.drafted_ids, traced.target_ids)
        with torch.no_grad():
            probs = model.judge(context, [asked])[0].sigmoid().tolist()
        wanted = []
        for ours, theirs, prob in zip(traced.drafted_ids, traced.target_ids, probs, strict=True):
            if ours != theirs and prob <= 0.5:
                wanted.append(theirs)
                break
            wanted.append(ours)
        else:
            wanted.append(traced.bonus_id)
        assert [token.token_id for token in traced.committed] == wanted
        context += wanted
        kinds |= {token.provenance for token in traced.committed}
    assert kinds == {Provenance.MATCHED, Provenance.RESCUED, Provenance.TARGET}


def test_a_round_without_a_mismatch_is_not_asked_about(target):
    model = trained(target)
    advisor = ArbiterAdvisor(model)
    made = decoder_with(target, target, ArbiterRule.of(arbiter_of(model)), advisor).generate(
        PROMPT, SamplingParams(max_new_tokens=40)
    )
    assert made.num_rescued == 0 and advisor.arbiter.num_read == 0


def test_the_cache_changes_no_answer_and_reads_less(target, draft):
    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    advisors = [ArbiterAdvisor(model, keep_context=keep) for keep in (True, False)]
    texts = [
        decoder_with(target, draft, rule, advisor).generate(PROMPT, SamplingParams(max_new_tokens=80)).token_ids
        for advisor in advisors
    ]
    assert texts[0] == texts[1]
    assert advisors[0].arbiter.num_read < 0.6 * advisors[1].arbiter.num_read


def test_lambda_may_be_given_by_place():
    assert ArbiterRule("somewhere", 0.3).spec == "arbiter:path=somewhere,lambda=0.3"


class AskedAlways(ArbiterAdvisor):
    """Is asked even where another rule has settled every mismatch."""

    def advise(self, block, target_ids, settled):
        return super().advise(block, target_ids, block.token_ids == target_ids)


@pytest.mark.parametrize(("temperature", "k"), [(0.0, 12), (1.0, 32)])
def test_what_another_rule_settles_is_not_asked_about(target, draft, temperature, k):
    model = trained(draft)
    rule = attached(f"arbiter:path=a,lambda=0.5|top_k:k={k}", arbiter_of(model))
    params = SamplingParams(max_new_tokens=80, temperature=temperature)
    advisors = [ArbiterAdvisor(model), AskedAlways(model)]
    made = [decoder_with(target, draft, rule, advisor).generate(PROMPT, params) for advisor in advisors]
    assert made[0].token_ids == made[1].token_ids and made[0].num_rescued
    assert 0 < advisors[0].arbiter.num_read < advisors[1].arbiter.num_read


def test_what_arbitration_needs_is_asked_for(target, draft):
    rule = ArbiterRule.of(arbiter_of(trained(draft)))
    with pytest.raises(SpecError, match="rule arbiter needs an advisor"):
        decoder_with(target, draft, rule, None)
    with pytest.raises(SpecError, match="needs the draft its arbiter was trained on"):
        make_advisor(rule, None)
    assert make_advisor(parse_rule("top_k"), draft) is None
    with pytest.raises(SpecError, match="must name one arbiter, got 2"):
        make_advisor(attached("arbiter:path=a&arbiter:path=b", rule.head), draft)
    from reprieve.drafters.eagle3 import EagleDrafter

    eagle = EagleDrafter(random_eagle(target), vocab_size=48)
    with pytest.raises(SpecError, match="needs chains"):
        SpeculativeDecoder(
            CachedModel(target, hidden_layers=eagle.target_layers),
            eagle,
            NumberTokenizer(),
            rule=rule,
            advisor=make_advisor(rule, draft),
        )


def attached(spec, arbiter):
    return with_heads(parse_rule(spec), lambda kind, path: arbiter)


def test_arbitration_composes_and_works_with_other_drafters(target, draft):
    arbiter = arbiter_of(trained(draft))
    both = attached("arbiter:path=a,lambda=0&top_k:k=2", arbiter)
    assert both.traits.check == "exact" and both.dial.name == "lambda" and both.dial_value == 0.0
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    made = decoder_with(target, draft, both, make_advisor(both, draft)).generate(PROMPT, params, trace=True)
    alone = attached("arbiter:path=a,lambda=0", arbiter)
    loose = decoder_with(target, draft, alone, make_advisor(alone, draft)).generate(PROMPT, params)
    context = list(PROMPT)
    for token in made.tokens:
        if token.provenance is Provenance.RESCUED:
            with torch.no_grad():
                assert token.token_id in target(torch.tensor([context])).logits[0, -1].topk(2).indices
        context.append(token.token_id)
    assert 0 < made.num_rescued < loose.num_rescued, "the second rule holds the first one back"
    rule = attached("arbiter:path=a,lambda=0.3", arbiter)
    ngram = SpeculativeDecoder(
        CachedModel(target), NgramDrafter(CPU), NumberTokenizer(), rule=rule, advisor=make_advisor(rule, draft)
    )
    assert len(ngram.generate([1, 2, 3, 1, 2], SamplingParams(max_new_tokens=30)).tokens) == 30


# ---- the formulas of section 3.4 ----


def round_of(*decisions, k=4):
    return RolloutRound(ArbitrationRound(8, [1] * k, [2] * k), tuple(decisions))


ACCEPTED_2 = Decision(2, True, target_log_prob=-2.0)
REJECTED_4 = Decision(4, False, target_log_prob=-5.0)


def rollout(*rounds, correct):
    return Rollout((1, 2, 3), tuple(rounds), correct)


@pytest.mark.parametrize(
    ("decisions", "emitted", "credit"),
    [
        ([ACCEPTED_2, REJECTED_4], 4, 2 / 3),  # (4 - 2) / (5 - 2)
        ([ACCEPTED_2], 5, 1.0),  # no rejection: K + 1
        ([Decision(2, False)], 2, 0.0),  # rejected at once
        ([Decision(4, True)], 5, 1.0),
        ([Decision(1, True), Decision(3, True), Decision(4, False)], 4, 3 / 4),
    ],
)
def test_length_credit_by_hand(decisions, emitted, credit):
    """Eq. 15, 19 and 20 at K = 4."""
    taken = round_of(*decisions)
    assert taken.num_emitted == emitted
    assert taken.length_credit == pytest.approx(credit)


def test_decision_rewards_and_returns_by_hand():
    """Eq. 20, 24 and 25: right rollouts get rho at each decision, failed ones pay surprisal and rejections."""
    rewards = Rewards()
    right = rollout(round_of(ACCEPTED_2, REJECTED_4), round_of(ACCEPTED_2), correct=True)
    assert rewards.decision_rewards(right) == [[pytest.approx(2 / 3)] * 2, [1.0]]
    assert rewards.rollout_return(right) == pytest.approx(2 / 3 + 2 / 3 + 1)
    failed = dataclasses.replace(right, correct=False)
    assert rewards.decision_rewards(failed) == [[-2.0, -0.25], [-2.0]]
    assert rewards.rollout_return(failed) == pytest.approx(-4.25)
    assert Rewards(risk=0.0).rollout_return(failed) == pytest.approx(-0.25)
    assert Rewards(rejection=0.0).rollout_return(failed) == pytest.approx(-4.0)
    assert Rewards(length=False).rollout_return(right) == 1.0
    assert Rewards(shaped=False).rollout_return(failed) == -1.0


def scored(value, *, correct):
    """A rollout whose return is `value`: that many rounds all accepted, or so many rejections at 0.25."""
    if correct:
        return rollout(*[round_of(Decision(1, True))] * value, correct=True)
    return rollout(*[round_of(Decision(1, False))] * int(-value / 0.25), correct=False)


def test_group_advantages_by_hand():
    rewards = Rewards()
    alike = [scored(1, correct=True), scored(3, correct=True)]
    assert rewards.group_advantages(alike) == pytest.approx([-1.0, 1.0], rel=1e-5)
    failed = [scored(-1, correct=False), scored(-3, correct=False)]
    assert rewards.group_advantages(failed) == pytest.approx([0.5, -0.5], rel=1e-5), "eta_fail = 0.5 (Eq. 26)"
    mixed = [scored(2, correct=True), scored(1, correct=True), scored(-1, correct=False)]
    # gamma = 1 / 3 (Eq. 27); the rescaled returns 2/3, 1/3, -1 have mean 0 and variance 14/27
    deviation = math.sqrt(14 / 27)
    wanted = [2 / 3 / deviation, 1 / 3 / deviation, -1 / deviation]
    assert rewards.group_advantages(mixed) == pytest.approx(wanted, rel=1e-4)
    # as they are: 2, 1, -1 with mean 2/3 and variance 14/9
    plain = [(value - 2 / 3) / math.sqrt(14 / 9) for value in (2, 1, -1)]
    assert Rewards(rebalance=False).group_advantages(mixed) == pytest.approx(plain, rel=1e-4)
    assert rewards.group_advantages([scored(1, correct=True)] * 3) == [0.0, 0.0, 0.0]
    with pytest.raises(SpecError, match="at least one rollout"):
        rewards.group_advantages([])


def test_credit_of_decisions_by_hand():
    rewards = Rewards()
    right = rollout(round_of(ACCEPTED_2, REJECTED_4), round_of(Decision(2, False)), correct=True)
    assert rewards.decision_advantages(right, 1.5) == [[pytest.approx(1.0)] * 2, [0.0]], "rho times the advantage"
    assert Rewards(share_credit=True).decision_advantages(right, 1.5) == [[pytest.approx(0.75)] * 2, [0.0]]
    failed = dataclasses.replace(right, correct=False)
    shares = rewards.decision_advantages(failed, -3.0)  # |g| = 2, 0.25 and 0.25 of 2.5
    assert shares == [[pytest.approx(-2.4), pytest.approx(-0.3)], [pytest.approx(-0.3)]]
    assert Rewards(risk=0.0, rejection=0.0).decision_advantages(failed, -3.0) == [[0.0, 0.0], [0.0]]


def test_clipped_objective_by_hand():
    """pi is 0.5; it was 0.4 for accepting: the ratio is 1.25 for an accepted token, 5/6 for a rejected one."""
    logits, old = torch.zeros(4), torch.full((4,), 0.4)
    accepted, advantages = torch.tensor([True, True, False, False]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = clipped_objective(logits, accepted, old, advantages)
    assert found.tolist() == pytest.approx([1.2, -1.25, 5 / 6, -5 / 6], rel=1e-5)
    assert clipped_objective(logits, accepted, old, advantages, clip=0.1)[3].item() == pytest.approx(-0.9)


def test_entropy_divergence_and_warm_up_loss_by_hand():
    zero, three_to_one = torch.zeros(1), torch.tensor([math.log(3.0)])
    assert policy_entropy(zero).item() == pytest.approx(math.log(2))
    assert policy_entropy(three_to_one).item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert policy_divergence(zero, three_to_one).item() == pytest.approx(
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    )
    assert policy_divergence(zero, zero).item() == 0.0
    loss = warm_up_loss(torch.cat([zero, three_to_one]), torch.tensor([0.3, 0.8]))
    assert loss.item() == pytest.approx(math.log(2) - 0.8 * math.log(0.75) - 0.2 * math.log(0.25)), "Eq. 29"


def test_a_climb_on_the_objective_raises_rewarded_and_lowers_punished_actions():
    """Signs: gradient ascent accepts more where accepting was rewarded, and less where it was punished."""
    logits = torch.zeros(4, requires_grad=True)
    accepted, advantages = torch.tensor([True, True, False, False]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    (-clipped_objective(logits, accepted, torch.full((4,), 0.5), advantages).sum()).backward()
    assert (-logits.grad).sign().tolist() == [1.0, -1.0, -1.0, 1.0]


# ---- rollouts ----


def test_sampled_decisions_follow_the_policy():
    generator = torch.Generator().manual_seed(0)
    num = 20_000
    seen = Evidence(
        token_ids=torch.zeros(num, dtype=torch.long),
        target_logits=torch.zeros(num, 3),
        greedy=True,
        lossless_accepts=torch.zeros(num, dtype=torch.bool),
        noise=torch.rand(num, generator=generator),
        advice=torch.full((num,), 0.3),
    )
    assert accepts(SampledArbiterRule(), seen).float().mean().item() == pytest.approx(0.3, abs=0.01)


def test_a_rollout_keeps_effective_decisions_and_what_decided_them(target, draft):
    model = trained(draft)
    made = decoder_with(target, draft, SampledArbiterRule(), ArbiterAdvisor(model)).generate(
        PROMPT, SamplingParams(max_new_tokens=61, temperature=1.0, seed=5), trace=True
    )
    found = rollout_of(made, correct=True)
    assert list(found.context_ids) == PROMPT + made.token_ids
    num_rejected = 0
    for taken in found.rounds:
        asked = taken.asked
        *before, last = taken.decisions
        assert all(decision.accepted for decision in before), "nothing behind a rejection is effective"
        num_rejected += not last.accepted
        end = asked.context_length + last.place - 1
        committed = found.context_ids[end]
        assert committed == (asked.draft_ids if last.accepted else asked.target_ids)[last.place - 1]
        with torch.no_grad():
            probs = model.judge(found.context_ids, [asked])[0].sigmoid()
            text = torch.tensor([[*found.context_ids[: asked.context_length], *asked.draft_ids]])
            log_probs = target(text).logits[0].log_softmax(-1)
        for decision in taken.decisions:
            place = decision.place - 1
            assert asked.draft_ids[place] != asked.target_ids[place], "matched tokens are no decisions"
            assert decision.old_prob == pytest.approx(float(probs[place]), abs=1e-4)
            expected = log_probs[asked.context_length - 1 + place, asked.draft_ids[place]]
            assert decision.target_log_prob == pytest.approx(float(expected), abs=1e-3)
    assert num_rejected > 3


# ---- the audit ----


def test_choices_are_counted_by_category():
    choices = BranchChoices([True, True, False, False, True, False], [1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 1, 0])
    counts = choices.counts()
    assert {name: count["num"] for name, count in counts.items()} == {
        "all": 6, "draft_better": 2, "target_better": 2, "both_right": 1, "both_wrong": 1
    }  # fmt: skip
    assert counts["draft_better"] == {"num": 2, "num_draft_not_worse": 2, "num_draft_chosen": 1, "num_agreed": 1}
    assert counts["target_better"] == {"num": 2, "num_draft_not_worse": 0, "num_draft_chosen": 1, "num_agreed": 1}
    assert counts["all"]["num_agreed"] == 4


class SameTextTask(LastWordTask):
    """The answer is the whole text."""

    def extract_answer(self, text):
        return text.strip()


def test_both_branches_of_every_decision_are_followed(target, draft):
    """The other branch, had its decision been the policy's own, is what the policy decodes from there."""
    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    decoder = decoder_with(target, draft, rule, ArbiterAdvisor(model))
    pair = Pair(target, draft, NumberTokenizer(), "t", "d")
    params = SamplingParams(max_new_tokens=40)
    text = " ".join(map(str, PROMPT))
    own = decoder.generate(text, params, trace=True)
    problems = [dataclasses.replace(problem("p", own.text.strip()), prompt=text)]
    found = diagnose(decoder, pair, SameTextTask(), problems, params)
    (choices,) = found.choices
    reached = sum(
        sum(
            not passed
            for place, passed in enumerate(traced.lossless_accepts)
            if place < min(len(traced.committed), len(traced.path) + 1)
        )
        for traced in own.trace
    )
    assert len(choices.accepted) == reached > 5 and found.num_correct == 1
    others = [
        target_side if accepted else draft_side
        for accepted, draft_side, target_side in zip(
            choices.accepted, choices.draft_utilities, choices.target_utilities, strict=True
        )
    ]
    assert set(others) == {0.0}, "another token in an answer makes another text"
    summary = found.summary()
    assert summary["all"]["num"] == reached and summary["all"]["share"][0] == 1.0


def test_branches_of_sampled_answers_go_on_greedily(target, draft):
    """One continuation tells only where it is the policy's greedy one; the choice is the sampled answer's own."""
    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    decoder = decoder_with(target, draft, rule, ArbiterAdvisor(model))
    pair = Pair(target, draft, NumberTokenizer(), "t", "d")
    text = " ".join(map(str, PROMPT))
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    made = [decoder.generate(text, dataclasses.replace(params, seed=5 + number), trace=True) for number in range(2)]
    first, place = next(
        (traced, place)
        for traced in made[0].trace
        for place, passed in enumerate(traced.lossless_accepts)
        if not passed
    )
    start = sum(len(traced.committed) for traced in made[0].trace[: made[0].trace.index(first)])
    branch = [*made[0].token_ids[:start], *first.drafted_ids[:place], first.target_ids[place]]
    rest = decoder.generate([*PROMPT, *branch], SamplingParams(max_new_tokens=24 - len(branch)))
    ends = NumberTokenizer().decode([*branch, *rest.token_ids], skip_special_tokens=True)
    problems = [dataclasses.replace(problem("p", ends.strip()), prompt=text)] * 2
    found = diagnose(decoder, pair, SameTextTask(), problems, params)
    choices, other = found.choices
    assert choices.target_utilities[0] == 1.0, "the target's side, gone on with greedily, is the reference"
    assert choices.accepted[0] == (place < len(first.path)) and found.num_correct == 0
    assert len(other.accepted) > 0 and made[0].token_ids != made[1].token_ids, "each answer has a seed of its own"


def test_a_branch_forced_to_what_was_taken_ends_as_it_did(target, draft):
    """Following a branch by its text and the rest of its block repeats the round exactly."""
    from reprieve.evaluation.branches import _Branches, _decisions
    from reprieve.labelling.responses import ResponseFormat

    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    decoder = decoder_with(target, draft, rule, ArbiterAdvisor(model))
    params = SamplingParams(max_new_tokens=40)
    responses = ResponseFormat(NumberTokenizer(), LastWordTask(), frozenset(), 40)
    item = dataclasses.replace(problem("p", "0"), prompt=" ".join(map(str, PROMPT)))
    branches = _Branches(decoder, responses, item, params)
    num_followed, turned = 0, 0
    for start, traced, place in _decisions(branches.made):
        text = [*branches.made.token_ids[:start], *traced.drafted_ids[:place]]
        if place < len(traced.path):
            text = [*text, traced.drafted_ids[place], *branches._scan_on(traced, place + 1)]
        else:
            text = [*text, traced.target_ids[place]]
        assert branches._continued(text[:40]) == branches.made.token_ids
        num_followed += 1
        other = branches._branch(start, traced, place, draft=place >= len(traced.path))
        forced = (traced.target_ids if place < len(traced.path) else traced.drafted_ids)[place]
        at = start + place
        assert len(other) == 40 and other[:at] == branches.made.token_ids[:at] and other[at] == forced
        text = [*branches.made.token_ids[:at], forced]
        if place >= len(traced.path):
            text += branches._scan_on(traced, place + 1)
        fresh = decoder.generate(
            [*PROMPT, *text[:40]], dataclasses.replace(params, max_new_tokens=max(1, 40 - len(text)))
        )
        turned += len(text) >= 40 or other == [*text, *fresh.token_ids]
    assert num_followed > 5 and turned == num_followed, "from there the same policy goes on"


def test_a_pair_builds_the_same_network_from_a_saved_arbiter(tmp_path, draft):
    model = trained(draft)
    arbiter_of(model).save_pretrained(tmp_path / "a")
    again = build_arbiter(Arbiter.from_pretrained(tmp_path / "a"), draft)
    asked = [ArbitrationRound(8, [1, 2, 3], [1, 5, 3])]
    with torch.no_grad():
        assert torch.equal(model.judge(PROMPT, asked)[0], again.judge(PROMPT, asked)[0])
