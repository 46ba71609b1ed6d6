"""Edge cases and past bugs: empty blocks, masks, odd vocabularies, half precision, interruptions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from reprieve import custom_generate
from reprieve.drafters import DraftModelDrafter, NgramDrafter
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.heads.settings import ArbiterShape
from reprieve.models.arbiter import ArbiterAdvisor, ArbiterModel
from reprieve.models.cached_model import CachedModel
from reprieve.rules import RULES, RiskBudget, accept, accepts, parse_rule
from reprieve.rules.lossless import SampledCheck
from reprieve.types import ROOT, Block, Evidence, Need, Provenance
from tests.kit.tiny import NumberTokenizer, ScriptedDrafter, checked_by, perturbed, random_head, tiny_model, with_heads

CPU = torch.device("cpu")
PROMPT = list(range(2, 22))
SPECS = [f"{name}:path=x" if name in ("judge", "pivot", "state_arbiter") else name for name in RULES.names()]
SPECS += ["lossless:verification=block", "lossless:verification=exact", "cascade:kind=tok"]
SPECS += ["top_k&floor", "top_k|floor", "margin:start=2 3,end=9"]


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def draft(target):
    return perturbed(target)


@pytest.mark.parametrize("spec", SPECS)
def test_every_rule_decodes_exactly_the_token_budget(target, draft, spec):
    rule = with_heads(parse_rule(spec), lambda kind: random_head(kind, size=32))
    drafter = DraftModelDrafter(CachedModel(draft, hidden_layers=rule.traits.draft_layers), CPU)
    cached = CachedModel(target, hidden_layers=rule.traits.target_layers)
    advisor = ArbiterAdvisor(ArbiterModel(draft, ArbiterShape())) if Need.ADVICE in rule.traits.needs else None
    decoder = SpeculativeDecoder(cached, drafter, NumberTokenizer(), rule=rule, num_draft_tokens=3, advisor=advisor)
    for temperature in (0.0, 0.8):
        for budget in range(1, 7):
            answer = decoder.generate(PROMPT, SamplingParams(max_new_tokens=budget, temperature=temperature, top_k=9))
            assert len(answer.tokens) == budget


def test_a_span_rule_works_when_ngrams_find_nothing(target):
    rule = parse_rule("margin:start=2 3,end=9")
    decoder = SpeculativeDecoder(CachedModel(target), NgramDrafter(CPU), NumberTokenizer(), rule=rule)
    assert len(decoder.generate([5, 6, 7], SamplingParams(max_new_tokens=10)).tokens) == 10


@pytest.mark.parametrize("spec", ["top_k:k=48", "margin:delta=99", "random:rate=1", "fuzzy:threshold=99", "floor"])
def test_no_rule_accepts_a_token_the_target_excludes(spec):
    scores = torch.tensor([[2.0, 1.0, -math.inf]])
    case = Evidence(
        torch.tensor([2]),
        torch.tensor([[2.0, 1.0, 1.5]]),
        False,
        torch.tensor([False]),
        target_scores=scores,
        draft_scores=torch.tensor([[1.0, 1.0, 3.0]]),
        uniforms=torch.tensor([0.5]),
        noise=torch.tensor([0.5]),
        parents=(ROOT,),
    )
    assert not accepts(parse_rule(spec), case).any()
    outcome = accept(
        parse_rule(spec),
        Block(torch.tensor([2]), (ROOT,), deterministic=True),
        case,
        checked_by(case.lossless_accepts),
        budget=RiskBudget(),
    )
    assert outcome.path == []


def test_sampled_tokens_stay_within_the_requests_top_k(target, draft):
    drafter = DraftModelDrafter(CachedModel(draft), CPU)
    decoder = SpeculativeDecoder(CachedModel(target), drafter, NumberTokenizer(), rule=parse_rule("top_k:k=8"))
    answer = decoder.generate(PROMPT, SamplingParams(max_new_tokens=60, temperature=1.5, top_k=2, seed=4))
    with torch.inference_mode():
        logits = target(torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for row, token_id in zip(logits, answer.token_ids, strict=True):
        assert token_id in row.topk(2).indices


@pytest.mark.slow
def test_lenience_keeps_its_bound_with_a_greedy_draft(target, draft):
    """Every first token's share is at most its probability / lenience, plus sampling noise."""
    drafter = DraftModelDrafter(CachedModel(draft), CPU)
    rule = parse_rule("lenience:lenience=0.9")
    decoder = SpeculativeDecoder(CachedModel(target), drafter, NumberTokenizer(), rule=rule)
    params = SamplingParams(max_new_tokens=2, temperature=2.0, draft_temperature=0.0)
    counts = torch.zeros(48)
    for seed in range(600):
        counts[decoder.generate(PROMPT, dataclasses.replace(params, seed=seed)).token_ids[0]] += 1
    with torch.inference_mode():
        probs = (target(torch.tensor([PROMPT])).logits[0, -1] / 2.0).softmax(-1)
    assert (counts / 600 <= probs / 0.9 + 0.08).all()


def test_a_draft_with_another_vocabulary_width_changes_nothing(target):
    for size in (48, 56):
        draft = tiny_model(seed=1, vocab_size=size)
        drafter = DraftModelDrafter(CachedModel(draft, vocab_size=48), CPU)
        decoder = SpeculativeDecoder(CachedModel(target), drafter, NumberTokenizer())
        alone = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer())
        params = SamplingParams(max_new_tokens=30)
        assert decoder.generate(PROMPT, params).token_ids == alone.generate(PROMPT, params).token_ids


def test_a_rule_with_limits_may_only_come_first_in_a_conjunction():
    assert parse_rule("asd&top_k").limits.budget == 4.0
    for spec in ("top_k&asd", "top_k|asd", "asd|top_k"):
        with pytest.raises(SpecError, match="limits of its own"):
            parse_rule(spec)
    unlimited = "asd:per_block=none,budget=inf"
    assert parse_rule(f"top_k&{unlimited}").spec and parse_rule(f"{unlimited}|top_k").spec


def test_walk_and_mask_agree_when_a_threshold_switches_everything_off():
    rows = torch.tensor([[0.6, 0.4]] * 3).log()
    block = Block.chain(torch.tensor([1, 1]), deterministic=True)
    case = Evidence(block.token_ids, rows[:-1], True, torch.tensor([False, False]), draft_scores=rows[:-1])
    for spec in ("typical:slack=-inf|floor:min_prob=0.1", "cascade:alpha=-inf"):
        rule = parse_rule(spec)
        outcome = accept(rule, block, case, checked_by(case.lossless_accepts), budget=RiskBudget())
        assert outcome.path == []
        assert not accepts(rule, case).any()


def test_markers_that_contain_separators_are_quoted():
    rule = parse_rule('margin:delta=2,start="<|think|>",end="<|end|>"')
    assert (rule.start, rule.end) == ("<|think|>", "<|end|>")
    assert parse_rule(rule.spec) == rule
    with pytest.raises(SpecError, match="not closed"):
        parse_rule('margin:start="<|think|>,end=x')


def test_block_verification_of_a_tree_is_refused(target):
    drafter = ScriptedDrafter(lambda ids, depth: Block(torch.tensor([1, 2]), (ROOT, ROOT), deterministic=True))
    rule = parse_rule("lossless:verification=block")
    decoder = SpeculativeDecoder(CachedModel(target), drafter, NumberTokenizer(), rule=rule)
    with pytest.raises(SpecError, match="needs a chain, got a tree"):
        decoder.generate(PROMPT, SamplingParams(max_new_tokens=4, temperature=1.0))


def test_probabilities_are_computed_in_float32(target):
    half = tiny_model().to(torch.bfloat16)
    model = CachedModel(half)
    with torch.inference_mode():
        logits, _ = model.forward(PROMPT)
    assert logits.dtype == torch.float32
    answer = SpeculativeDecoder(CachedModel(half), NgramDrafter(CPU), NumberTokenizer()).generate(
        PROMPT, SamplingParams(max_new_tokens=20, temperature=1.0)
    )
    assert len(answer.tokens) == 20


def test_an_interrupted_forward_leaves_the_cache_usable(target):
    model = CachedModel(target)
    with torch.inference_mode():
        model.start(PROMPT)
        expected, _ = model.forward([30, 31])

        def stop(module, arguments):
            raise KeyboardInterrupt

        hook = target.model.layers[1].mlp.down_proj.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model.forward([32, 33])
        hook.remove()
        model.start(PROMPT, reuse_prefix=True)
        again, _ = model.forward([30, 31])
    torch.testing.assert_close(again, expected)


class TestCustomGenerate:
    ids = torch.tensor([PROMPT])

    def options(self, **changes):
        return {"custom_generate": custom_generate, "max_new_tokens": 40, "pad_token_id": 0, **changes}

    def test_end_of_text_and_stream_are_obeyed(self, target, draft):
        plain = target.generate(self.ids, **self.options(do_sample=False))[0, 20:].tolist()
        eos = plain[6]
        end = plain.index(eos) + 1
        seen = []

        output = target.generate(
            self.ids,
            **self.options(do_sample=False, draft_model=draft, eos_token_id=eos),
            on_token=lambda token, text: seen.append(token.token_id),
        )
        assert output[0, 20:].tolist() == seen == plain[:end]

    def test_sampling_follows_torchs_seed(self, target, draft):
        def sample(seed):
            torch.manual_seed(seed)
            return target.generate(self.ids, **self.options(do_sample=True, draft_model=draft)).tolist()

        assert sample(1) == sample(1) != sample(2)

    @pytest.mark.parametrize(
        ("extra", "says"),
        [
            ({"repetition_penalty": 1.2}, "repetition_penalty must be 1.0"),
            ({"num_beams": 2}, "num_beams must be 1"),
            ({"return_dict_in_generate": True}, "return_dict_in_generate must be False"),
            ({"rule": "math_symbols"}, "pass text_tokenizer="),
            ({"attention_mask": torch.tensor([[0] + [1] * 19])}, "must not be padded"),
        ],
    )
    def test_options_that_would_change_the_answer_are_refused(self, target, extra, says):
        with pytest.raises(SpecError, match=says):
            target.generate(self.ids, **self.options(do_sample=False, **extra))


def test_a_matched_sibling_of_a_sampled_tree_is_no_rescue():
    # The first sibling is refused; the second passes under the residual although it would not have under the target.
    target = torch.tensor([[0.55, 0.45], [0.5, 0.5], [0.5, 0.5]]).log()
    block = Block(torch.tensor([0, 1]), (ROOT, ROOT), deterministic=True)
    judged = target[[0, 0]]
    uniforms = torch.tensor([0.9, 0.8])
    check = SampledCheck(
        target, block.token_ids, block.parent_rows, uniforms=uniforms, proposal_probs=None, draw=lambda p: p.argmax(-1)
    )
    assert check.accepts.tolist() == [False, False]
    case = Evidence(block.token_ids, judged, False, check.accepts, target_scores=judged, uniforms=uniforms)
    outcome = accept(parse_rule("lossless"), block, case, check.resolve(block), budget=RiskBudget())
    assert outcome.path == [1]
    assert outcome.provenance == [Provenance.MATCHED]


def test_a_stop_text_that_is_a_special_token_ends_the_answer(target):
    """Decoded text leaves special tokens out, so searching the text would never find the stop."""
    from types import SimpleNamespace

    free = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer()).generate(
        [1, 2], SamplingParams(max_new_tokens=12)
    )
    third = free.token_ids[2]
    tokenizer = NumberTokenizer()
    tokenizer.added_tokens_decoder = {third: SimpleNamespace(content="<|end|>", special=True)}
    decoder = SpeculativeDecoder(CachedModel(target), None, tokenizer)
    params = SamplingParams(max_new_tokens=12, stop=("<|end|>",), ignore_eos=True)
    made = decoder.generate([1, 2], params)
    assert made.finish_reason == "stop" and made.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
