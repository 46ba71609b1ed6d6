"""CoSpec's rule in the decoding loop."""

import dataclasses

import pytest
import torch

from reprieve.drafters import NgramDrafter
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.settings import ArbiterShape
from reprieve.models.arbiter import ArbiterAdvisor, ArbitrationRound, make_advisor
from reprieve.models.cached_model import CachedModel
from reprieve.rules import accepts, parse_rule
from reprieve.rules.arbiter import ArbiterRule
from reprieve.types import Evidence, Provenance
from tests.kit.arbiters import CPU, PROMPT, arbiter_of, decoder_with, trained
from tests.kit.tiny import IDENTITY, NumberTokenizer, random_eagle, with_heads


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
def test_lambda_one_is_lossless_and_lambda_zero_accepts_the_whole_draft(target, draft, temperature):
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


def test_rounds_without_a_mismatch_skip_the_arbiter(target):
    model = trained(target)
    advisor = ArbiterAdvisor(model)
    made = decoder_with(target, target, ArbiterRule.of(arbiter_of(model)), advisor).generate(
        PROMPT, SamplingParams(max_new_tokens=40)
    )
    assert made.num_rescued == 0 and advisor.num_read == 0


class Forgetful(ArbiterAdvisor):
    def advise(self, *args):
        self.forget()
        return super().advise(*args)


def test_the_cache_reads_fewer_tokens_and_changes_no_answer(target, draft):
    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    advisors = [ArbiterAdvisor(model), Forgetful(model)]
    texts = [
        decoder_with(target, draft, rule, advisor).generate(PROMPT, SamplingParams(max_new_tokens=80)).token_ids
        for advisor in advisors
    ]
    assert texts[0] == texts[1]
    assert advisors[0].num_read < 0.6 * advisors[1].num_read


def test_lambda_may_be_a_positional_argument():
    assert ArbiterRule("somewhere", 0.3).spec == "arbiter:path=somewhere,lambda=0.3"


class AskedAlways(ArbiterAdvisor):
    """An advisor that judges mismatches that another rule has settled, too."""

    def advise(self, block, evidence, settled):
        return super().advise(block, evidence, block.token_ids == evidence.own_ids)


@pytest.mark.parametrize(("temperature", "k"), [(0.0, 12), (1.0, 32)])
def test_mismatches_settled_by_another_rule_skip_the_arbiter(target, draft, temperature, k):
    model = trained(draft)
    rule = attached(f"arbiter:path=a,lambda=0.5|top_k:k={k}", arbiter_of(model))
    params = SamplingParams(max_new_tokens=80, temperature=temperature)
    advisors = [ArbiterAdvisor(model), AskedAlways(model)]
    made = [decoder_with(target, draft, rule, advisor).generate(PROMPT, params) for advisor in advisors]
    assert made[0].token_ids == made[1].token_ids and made[0].num_rescued
    assert 0 < advisors[0].num_read < advisors[1].num_read


def test_missing_inputs_of_arbitration_are_refused(target, draft):
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
    return with_heads(parse_rule(spec), lambda kind: arbiter)


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
