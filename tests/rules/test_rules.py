"""Every rule: lossless at its strictest, nested as it loosens, independent of layout, worked by hand at K = 3."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from reprieve.errors import SpecError
from reprieve.rules import RULES, AllOf, accepts, parse_rule
from reprieve.rules.base import within_threshold
from reprieve.types import Context, Evidence
from tests.kit.tiny import NumberTokenizer, with_heads

VOCAB_SIZE = 12
HIDDEN_SIZE = 6

# A specification of each rule and values of its dial from strict to lenient.
LADDERS = [
    ("top_k", [1, 2, 3, 6, 12]),
    ("typical", [-math.inf, -2.0, -0.5, 0.0, 1.0, 4.0]),
    ("typical:epsilon=0.3,delta=0.8", [-math.inf, -1.0, 0.0, 2.0]),
    ("margin", [0.0, 0.3, 1.0, 2.5, 9.0]),
    ("margin:scale=prob,k=4", [0.0, 0.1, 0.4, 1.0]),
    ("ratio", [1.0, 0.8, 0.5, 0.1, 0.0]),
    ("ratio:k=none", [1.0, 0.8, 0.5, 0.1, 0.0]),
    ("floor", [1.0, 0.5, 0.1, 1e-4, 0.0]),
    ("lenience", [1.0, 0.8, 0.3, 0.01]),
    ("random", [0.0, 0.3, 0.7, 1.0]),
    ("fly:window=2", [math.inf, 1.0, 0.5, 0.0]),
    ("fly:variant=vllm", [math.inf, 1.0, 0.5, 0.0]),
    ("fly:variant=normalised,window=1", [math.inf, 0.9, 0.4, 0.0]),
    ("asd:per_block=none", [0.0, 1.0, 5.0]),
    ("cascade:kind=opt", [-math.inf, -1.0, 0.0, 0.5, 3.0]),
    ("cascade:kind=diff", [-math.inf, -0.2, 0.0, 0.5]),
    ("cascade:kind=chow", [-math.inf, 0.2, 0.5, 1.0]),
    ("cascade:kind=tok", [-math.inf, 0.0, 0.3, 0.9]),
    ("math_symbols", [1, 2, 5, 12]),
    ("math_symbols:tokens=draft", [1, 2, 5, 12]),
    *[
        (f"fuzzy:divergence={divergence},form={form}" + k, [0.0, 0.05, 0.2, 0.6, 30.0])
        for divergence in ("js", "kl", "tv")
        for form in ("paper", "released")
        for k in ("", ",k=3")
    ],
    ("judge:path=j", [0.0, 0.01, 0.3, 0.6, 1.0]),
    ("pivot:path=p", [0.0, 0.2, 0.5, 1.0]),
    ("state_arbiter:path=s", [0.0, 0.3, 0.5, 0.51, 1.0]),
    ("lts:path=l", [math.inf, 1.0, 0.9, 0.3, 0.0, -5.0]),
    ("arbiter:path=a", [1.0, 0.95, 0.6, 0.3, 0.0]),
    ("top_k&floor:min_prob=0.02", [1, 2, 6, 12]),
    ("margin:start=1 2,end=3", [0.0, 1.0, 9.0]),
]


def text(*token_ids: int) -> Context:
    """One text before the drafted tokens."""
    return Context(torch.tensor([token_ids]), torch.tensor([len(token_ids)]))


def evidence(*, greedy: bool, size: int = 200, seed: int = 0) -> Evidence:
    """Random logits in which draft and target often agree."""
    generator = torch.Generator().manual_seed(seed)
    target = 2.5 * torch.randn(size, VOCAB_SIZE, generator=generator)
    draft = target + 1.5 * torch.randn(size, VOCAB_SIZE, generator=generator)
    token_ids = torch.multinomial(draft.softmax(-1), 1, generator=generator).squeeze(-1)
    uniforms = torch.rand(size, generator=generator)
    embeddings = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed + 1))
    if greedy:
        lossless = target.argmax(-1) == token_ids
    else:
        index = torch.arange(size)
        ratio = target.softmax(-1)[index, token_ids] / draft.softmax(-1)[index, token_ids]
        lossless = uniforms < ratio
    return Evidence(
        token_ids=token_ids,
        target_logits=target,
        greedy=greedy,
        lossless_accepts=lossless,
        draft_scores=draft,
        draft_logits=draft,
        uniforms=None if greedy else uniforms,
        noise=torch.rand(size, generator=generator),
        parents=range(-1, size - 1),
        context=text(1, 2),
        node_hidden={-1: torch.randn(size, HIDDEN_SIZE, generator=generator)},
        draft_hidden={-1: torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed + 2))},
        token_embeddings=embeddings[token_ids],
        top_embeddings=embeddings[target.argmax(-1)],
        advice=torch.rand(size, generator=generator),
    )


class WordTokenizer(NumberTokenizer):
    """Every third token is a digit, the others are words."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(f" {i}" if i % 3 == 0 else " word" for i in token_ids)


def bound(spec: str):
    return with_heads(parse_rule(spec)).bind(WordTokenizer(VOCAB_SIZE))


def test_rules_that_need_a_head_say_so():
    from reprieve.errors import SpecError
    from reprieve.heads.loading import attach_heads

    with pytest.raises(SpecError, match="needs path=FOLDER"):
        attach_heads(parse_rule("judge"))


def test_every_rule_has_a_ladder():
    assert {spec.partition(":")[0].partition("&")[0] for spec, _ in LADDERS} | {"lossless"} == set(RULES.names())


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("spec", "ladder"), LADDERS)
def test_strictest_equals_lossless_and_accepted_sets_nest(spec, ladder, greedy):
    rule = bound(spec)
    case = evidence(greedy=greedy)
    assert ladder[0] == rule.dial.strictest
    before = None
    for value in ladder:
        accepted = accepts(rule.with_dial(value), case)
        if before is None and rule.traits.replaces:
            assert not accepted.any(), "a replacing rule at its strictest leaves every token to the target"
        elif before is None:
            assert torch.equal(accepted, case.lossless_accepts)
        else:
            assert (accepted | ~before).all(), f"loosening to {value} lost an accepted token"
        before = accepted
    if "tok" not in spec or greedy:  # tok acts through its distribution when sampling
        assert before is not None
        assert before.sum() > case.lossless_accepts.sum(), "the loosest threshold must rescue something"


@pytest.mark.parametrize("divergence", ["js", "kl", "tv"])
@pytest.mark.parametrize("form", ["paper", "released"])
@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_fuzzy_accepts_nothing_at_0_however_close_the_models_are(divergence, form, noise):
    case = evidence(greedy=False)
    draft = case.target_logits + noise * torch.randn_like(case.target_logits)
    rule = parse_rule(f"fuzzy:threshold=0,divergence={divergence},form={form}")
    assert not accepts(rule, dataclasses.replace(case, draft_scores=draft, draft_logits=draft)).any()


@pytest.mark.parametrize(("spec", "ladder"), LADDERS)
def test_padding_order_and_layout_change_nothing(spec, ladder):
    if "fly" in spec or "start" in spec:
        pytest.skip("reads the order of the block")
    rule = bound(spec).with_dial(ladder[-2])
    case = evidence(greedy=True, size=24)
    expected = rule.risk(case)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))

    def moved(tensor, change):
        return None if tensor is None else change(tensor)

    tensors = ("token_ids", "target_logits", "lossless_accepts", "draft_scores", "draft_logits", "noise", "advice")
    states = {name: getattr(case, name)[-1] for name in ("node_hidden", "draft_hidden")}
    permuted = dataclasses.replace(case, **{n: moved(getattr(case, n), lambda t: t[order]) for n in tensors})
    tables = ("token_embeddings", "top_embeddings")
    permuted = dataclasses.replace(
        permuted,
        **{name: {-1: hidden[order]} for name, hidden in states.items()},
        **{name: getattr(case, name)[order] for name in tables},
    )
    torch.testing.assert_close(rule.risk(permuted), expected[order])
    folded = dataclasses.replace(
        case, **{n: moved(getattr(case, n), lambda t: t.unflatten(0, (2, 12))) for n in tensors}
    )
    folded = dataclasses.replace(
        folded,
        **{name: {-1: hidden.unflatten(0, (2, 12))} for name, hidden in states.items()},
        **{name: getattr(case, name).unflatten(0, (2, 12)) for name in tables},
    )
    torch.testing.assert_close(rule.risk(folded), expected.unflatten(0, (2, 12)))
    # Extra columns that no model predicts, as in padded vocabularies.
    if "released" not in spec and "k=3" not in spec:
        names = ("target_logits", "draft_scores", "draft_logits")
        wide = {n: torch.nn.functional.pad(getattr(case, n), (0, 4), value=-1e4) for n in names}
        torch.testing.assert_close(rule.risk(dataclasses.replace(case, **wide)), expected, rtol=1e-4, atol=1e-5)


def hand(target, draft, tokens, **extra) -> Evidence:
    """Evidence for K = 3 from explicit probabilities."""
    target, draft = torch.tensor(target), torch.tensor(draft)
    token_ids = torch.tensor(tokens)
    return Evidence(
        token_ids=token_ids,
        target_logits=target.log(),
        greedy=True,
        lossless_accepts=target.argmax(-1) == token_ids,
        draft_scores=draft.log(),
        parents=(-1, 0, 1),
        **extra,
    )


TARGET = [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.4, 0.4 - 1e-3, 0.2 + 1e-3]]
DRAFT = [[0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]
TOKENS = [1, 0, 2]


@pytest.mark.parametrize(
    ("spec", "risk"),
    [
        ("top_k", [2, 1, 3]),
        ("margin", [math.log(0.5 / 0.3), 0, math.log(0.4 / 0.201)]),
        ("margin:scale=prob,delta=0.5", [0.2, 0, 0.199]),
        ("margin:k=2", [math.log(0.5 / 0.3), 0, math.inf]),
        ("ratio:k=none", [math.log(0.5 / 0.3), 0, math.log(0.4 / 0.201)]),
        ("floor", [-math.log(0.3), -math.log(0.6), -math.log(0.201)]),
        ("lenience", [math.log(0.5 / 0.3), 0, math.log(0.4 / 0.201)]),
        ("asd", [math.log(0.5 / 0.3), 0, math.log(0.4 / 0.201)]),
        ("fuzzy:divergence=tv", [0.4, 0, 0.599]),
        # KL(target || draft) in bits at the first position, by hand.
        ("fuzzy:divergence=kl", [0.5 * math.log2(2.5) + 0.3 * math.log2(3 / 7) + 0.2 * math.log2(2), 0, None]),
        (
            "fuzzy:divergence=kl,log_base=2.718281828459045",
            [0.5 * math.log(2.5) + 0.3 * math.log(3 / 7) + 0.2 * math.log(2), 0, None],
        ),
        (
            "fuzzy:divergence=kl,form=released",
            [0.2 * math.log(0.4) + 0.7 * math.log(7 / 3) + 0.1 * math.log(0.5), 0, None],
        ),
        ("cascade:kind=chow", [0.3, 0.4, 0.2]),
        ("cascade:kind=diff", [-0.2, 0.0, -0.4]),
        ("cascade:kind=opt", [-0.2 / 0.4, -math.inf, -0.4 / 0.599]),
        ("cascade:kind=tok", [1 - 0.3 / 0.5, 0, 1 - 0.201 / 0.4]),
        # min(0.09, 0.3 exp(-H)) is 0.09 at all three; the risk is log(0.09 / p).
        ("typical", [math.log(0.09 / 0.3), math.log(0.09 / 0.6), math.log(0.09 / 0.201)]),
    ],
)
def test_risk_worked_by_hand_at_three_tokens(spec, risk):
    found = bound(spec).risk(hand(TARGET, DRAFT, TOKENS)).tolist()
    for mine, expected in zip(found, risk, strict=True):
        if expected is not None:
            assert mine == pytest.approx(expected, abs=1e-5)


def test_js_divergence_by_hand_in_both_forms():
    case = hand([[0.5, 0.5]], [[1.0, 0.0]], [0])
    case = dataclasses.replace(case, parents=(-1,))
    # m = (0.75, 0.25): 0.5 KL(t, m) + 0.5 KL(d, m) = 0.5 (0.5 ln(2/3) + 0.5 ln 2) + 0.5 ln(4/3)
    nats = 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2)) + 0.5 * math.log(4 / 3)
    assert float(bound("fuzzy").risk(case)) == pytest.approx(nats / math.log(2), abs=1e-6)
    assert math.isinf(float(bound("fuzzy:form=released").risk(case))), "KL(m, draft) where the draft excludes a token"
    disjoint = dataclasses.replace(hand([[1.0, 0.0]], [[0.0, 1.0]], [1]), parents=(-1,))
    assert float(bound("fuzzy").risk(disjoint)) == pytest.approx(1.0), "base 2 puts Jensen-Shannon on 0 to 1"


def test_fly_forgives_only_where_the_window_matches_and_fits():
    # The target prefers token 0 everywhere and is unsure; drafted: one mismatch at 2, then matches.
    probs = [[0.4, 0.3, 0.3]] * 8
    tokens = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0])
    case = Evidence(
        token_ids=tokens,
        target_logits=torch.tensor(probs).log(),
        greedy=True,
        lossless_accepts=tokens == 0,
        parents=range(-1, 7),
    )
    assert accepts(bound("fly:window=3"), case).tolist() == [True] * 6 + [False, True]
    assert accepts(bound("fly:window=4"), case).tolist() == [True, True, False, True, True, True, False, True]
    assert accepts(bound("fly:window=1"), case).tolist() == [True] * 8
    assert accepts(bound("fly:window=3,theta=1.2"), case).tolist() == (tokens == 0).tolist(), "ln 3 is below 1.2"


def test_the_vllm_variant_of_fly_sets_its_window_from_k():
    # A mismatch and two matches, a block cut short at K = 8: the window is 6, as vLLM configures it once.
    tokens = torch.tensor([1, 0, 0])
    case = Evidence(
        token_ids=tokens,
        target_logits=torch.tensor([[0.4, 0.3, 0.3]] * 3).log(),
        greedy=True,
        lossless_accepts=tokens == 0,
        parents=range(-1, 2),
    )
    rule = bound("fly:variant=vllm")
    assert accepts(rule, dataclasses.replace(case, num_draft_tokens=8)).tolist() == [False, True, True]
    assert accepts(rule, dataclasses.replace(case, num_draft_tokens=3)).tolist() == [True] * 3
    assert accepts(rule, case).tolist() == [True] * 3, "K varies: the block's own"
    # A tree counts by its depth: two branches of three tokens.
    tree = dataclasses.replace(
        case,
        token_ids=tokens.repeat(2),
        target_logits=case.target_logits.repeat(2, 1),
        lossless_accepts=tokens.repeat(2) == 0,
        parents=(-1, 0, 1, -1, 3, 4),
    )
    assert accepts(rule, tree).tolist() == [True] * 6


def test_math_symbols_refuses_digits_operators_and_variables_only():
    from reprieve.rules.math_symbols import is_mathematical

    assert all(map(is_mathematical, ["7", "+", " =", "x", " y", "%", "12.5", "√", " <"]))
    assert not any(map(is_mathematical, [" the", "total", ".", ",", " a", "I", " we", "\n", ""]))


@pytest.mark.parametrize(
    ("spec", "without"),
    [
        ("margin:delta=2", "margin"),
        ("fuzzy:threshold=2,divergence=kl", "fuzzy:divergence=kl"),
        ("lossless", "lossless"),
        ("margin:delta=1&ratio:ratio=0.5|margin:delta=2", "margin&ratio:ratio=0.5|margin:delta=2"),
        ("margin:delta=1,start=<a>,end=</a>", "margin:start=<a>,end=</a>"),
    ],
)
def test_a_specification_without_its_dial_keeps_the_rest(spec, without):
    assert parse_rule(spec).spec_without_dial == without


def test_span_holds_between_its_markers_and_never_closes_itself():
    rule = bound("margin:delta=9,start=1 2,end=3")
    case = evidence(greedy=True, size=4)
    drafted = torch.tensor([5, 3, 5, 5])
    inside = dataclasses.replace(case, token_ids=drafted, parents=(-1, 0, 1, 2), context=text(1, 2, 7))
    assert torch.isfinite(rule.risk(inside)).tolist() == [True, False, False, False]
    outside = dataclasses.replace(inside, context=text(1, 2, 3))
    assert torch.isinf(rule.risk(outside)).all()
    reverse = dataclasses.replace(rule, outside=True)
    assert torch.isinf(reverse.risk(inside)).tolist() == [True, True, False, False]
    assert torch.isfinite(reverse.risk(outside)).any()
    assert parse_rule(reverse.spec).outside
    reopened = dataclasses.replace(outside, token_ids=torch.tensor([1, 2, 5, 5]))
    assert torch.isfinite(rule.risk(reopened)).tolist() == [False, False, True, True]


@pytest.mark.parametrize("bad", ["margin:span=llama", "margin:outside=true", "margin:start=a,end=b,outside=1"])
def test_invalid_spans_are_refused(bad):
    with pytest.raises(SpecError):
        parse_rule(bad)


def test_composition_needs_both_or_either():
    case = hand(TARGET, DRAFT, TOKENS)
    assert accepts(bound("top_k:k=2&floor:min_prob=0.31"), case).tolist() == [False, True, False]
    assert accepts(bound("top_k:k=2&floor:min_prob=0.29"), case).tolist() == [True, True, False]
    assert accepts(bound("top_k:k=2|floor:min_prob=0.2"), case).tolist() == [True, True, True]
    never = hand([[0.5, 0.5, 0.0]] * 3, DRAFT, [2, 2, 2])  # infinite risks against infinite thresholds
    for other in ("margin:delta=inf", "ratio:ratio=0", "floor:min_prob=0"):
        assert not accepts(bound(f"top_k:k=1|{other}"), never).any()
        assert not accepts(bound(f"top_k:k=3&{other}"), never).any()
    composed = AllOf((parse_rule("top_k:k=2"), parse_rule("floor:min_prob=0.29")))
    assert composed.spec == "top_k:k=2&floor:min_prob=0.29"
    assert parse_rule(composed.spec) == composed


def test_thresholds_can_differ_by_row():
    case = hand(TARGET, DRAFT, TOKENS)
    risk = parse_rule("top_k").risk(case)
    assert within_threshold(risk, torch.tensor([1.0, 1.0, 3.0])).tolist() == [False, True, True]


def test_infinite_and_undefined_risks_never_pass():
    case = hand([[0.5, 0.5, 0.0]] * 3, DRAFT, [2, 2, 2])
    assert not accepts(bound("floor:min_prob=0"), case).any()
    assert not accepts(bound("margin:delta=inf,k=2"), case).any()


@pytest.mark.parametrize("spec", [spec for spec, _ in LADDERS])
def test_spec_round_trips(spec):
    rule = parse_rule(spec)
    assert parse_rule(rule.spec) == rule
    import json

    json.dumps(rule.params)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "empty"),
        ("nucleus", "one of arbiter, asd"),
        ("top_k:k=0", "1 or more, got 0"),
        ("top_k:k=two", "whole number, got 'two'"),
        ("top_k:size=2", "no parameter 'size'; it takes k"),
        ("top_k:k", "name=value, got 'k'"),
        ("top_k:k=1,k=2", "given twice"),
        ("top_k:k=2@K=4", "@K= belongs to an arm of bench; elsewhere, use --num-draft-tokens"),
        ("top_k@drafter=ngram", "@drafter= belongs to an arm of bench; elsewhere, use --drafter"),
        ("fuzzy:divergence=cosine", "divergence must be one of js, kl, tv, got 'cosine'"),
        ("fuzzy:threshold=-1", "threshold must be in [0, inf], got -1.0"),
        ("fuzzy:threshold=nan", "got nan"),
        ("ratio:ratio=1.5", "ratio must be in [0, 1], got 1.5"),
        ("lenience:lenience=0", "lenience must be in (0, 1], got 0.0"),
        ("fuzzy&top_k", "rescue"),
        ("lossless|top_k", "rescue"),
        ("margin:start=<think>", "needs both start and end"),
        ("fuzzy:start=a,end=b", "rescue"),
    ],
)
def test_bad_specs_name_the_parameter_the_range_and_the_value(spec, says):
    from reprieve.errors import SpecError

    with pytest.raises(SpecError) as caught:
        parse_rule(spec)
    assert says in str(caught.value)


def test_paths_may_contain_what_looks_like_a_setting_of_an_arm():
    assert parse_rule("judge:path=heads/judge@K=4").path == "heads/judge@K=4"
