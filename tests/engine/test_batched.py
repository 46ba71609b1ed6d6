"""Decoding in batches: the local engine's answers, round for round, whatever else is in the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel

from reprieve.drafters import EagleDrafter, EagleSettings
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request
from reprieve.errors import ContextOverflowError, SpecError, UnsupportedModelError
from reprieve.models.row_model import RowModel
from reprieve.rules import parse_rule
from reprieve.types import Provenance
from tests.kit.tiny import (
    ARCHITECTURES,
    VOCAB_SIZE,
    NumberTokenizer,
    perturbed,
    random_eagle,
    random_head,
    tiny_model,
    with_heads,
)

PROMPTS = [[5], [7, 8], list(range(2, 22)), list(range(30, 40)), [1] * 33]
RULES = (
    "lossless", "margin:delta=2", "margin:delta=0.5", "typical", "fuzzy:threshold=0.3", "fly:theta=0.3", "top_k:k=3",
    "asd", "asd&top_k:k=4", "lenience:lenience=0.3", "margin:delta=2,strict_first=6",
    "judge:path=memory,threshold=0.5", "pivot:path=memory,threshold=0.5", "state_arbiter:path=memory,threshold=0.5",
)  # fmt: skip


def pair_of(kind="llama", eos_token_id=None, draft_columns=VOCAB_SIZE):
    target = tiny_model(kind)
    draft = perturbed(target, noise=0.05)
    if draft_columns != VOCAB_SIZE:
        draft.config = copy.deepcopy(draft.config)  # it was the target's
        draft.resize_token_embeddings(draft_columns)
    return Pair(target, draft, NumberTokenizer(eos_token_id=eos_token_id), "tiny/target", "tiny/draft")


def rule_of(spec, pair=None):
    return with_heads(parse_rule(spec), lambda kind: random_head(kind, size=32, pair=pair.identity))


def together(pair, requests, *, params=None, num_rows=7, num_draft_tokens=5, **keywords):
    """Answer all (prompt, rule) in one batch."""
    params = params or SamplingParams(max_new_tokens=24)
    rules = list({rule.spec: rule for _, rule in requests}.values())
    decoder = BatchedSpeculativeDecoder(
        pair, num_rows=num_rows, num_draft_tokens=num_draft_tokens, params=params, rules=rules, **keywords
    )
    made = {}
    for number, (prompt, rule) in enumerate(requests):
        decoder.submit(
            Request(
                prompt,
                rule,
                params.max_new_tokens,
                lambda one, number=number: made.update({number: one}),
                seed=1000 * params.seed + number,
            )
        )
    while not decoder.idle:
        decoder.step()
    return [made[number] for number in range(len(requests))]


def facts(answer):
    origin = [token.provenance for token in answer.tokens]
    return answer.token_ids, origin, answer.round_lengths, answer.text, answer.finish_reason, answer.num_drafted


@pytest.mark.parametrize(
    "kind", [ARCHITECTURES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in ARCHITECTURES[1:])]
)
def test_mixed_rules_give_the_local_engines_rounds(kind):
    pair = pair_of(kind)
    params = SamplingParams(max_new_tokens=24)
    rules = RULES if kind == ARCHITECTURES[0] else ("lossless", *RULES[1::3])  # of each kind of input
    requests = [(prompt, rule_of(spec, pair)) for prompt in PROMPTS for spec in rules]
    answers = together(pair, requests, params=params)
    for (prompt, rule), answer in zip(requests, answers, strict=True):
        alone = pair.decoder(rule, num_draft_tokens=5).generate(prompt, params)
        assert facts(answer) == facts(alone), (rule.spec, prompt)
    origins = {token.provenance for answer in answers for token in answer.tokens}
    assert origins == set(Provenance)


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_chains_of_an_eagle_head_give_the_local_engines_rounds(draft_vocab_size):
    """Rows join and leave at different times, so each has its own cached tokens and unread states."""
    pair = pair_of()
    head = random_eagle(pair.target, draft_vocab_size=draft_vocab_size)
    specs = (
        "lossless",
        "margin:delta=2",
        "fuzzy:threshold=0.3",
        "top_k:k=3",
        "typical",
        "judge:path=memory,threshold=0.5",
    )
    requests = [(prompt, rule_of(spec, pair)) for prompt in [*PROMPTS, PROMPTS[0]] for spec in specs]
    answers = together(pair, requests, eagle=head)
    settings = EagleSettings(top_k=1)
    for (prompt, rule), answer in zip(requests, answers, strict=True):
        drafter = EagleDrafter(head, vocab_size=pair.vocab_size, settings=settings)
        target = pair.cached_target(tuple({*drafter.target_layers, *rule.traits.target_layers}))
        decoder = SpeculativeDecoder(target, drafter, pair.tokenizer, rule=rule, num_draft_tokens=5)
        assert facts(answer) == facts(decoder.generate(prompt, SamplingParams(max_new_tokens=24))), (rule.spec, prompt)
    assert {token.provenance for answer in answers for token in answer.tokens} == set(Provenance)


def test_sampled_chains_of_an_eagle_head_follow_the_target():
    from scipy.stats import chisquare

    target = tiny_model(seed=1, scale=1.2, vocab_size=8)
    pair = Pair(target, None, NumberTokenizer(), "tiny/target", None)
    params = SamplingParams(max_new_tokens=3, temperature=1.0)
    requests = [([3, 1, 2], parse_rule("lossless"))] * 1500  # each with its own seed
    answers = together(pair, requests, params=params, num_rows=100, eagle=random_eagle(target))
    with torch.inference_mode():
        first = target(torch.tensor([[3, 1, 2]])).logits[0, -1].softmax(-1).double()
        after = target(torch.tensor([[3, 1, 2, token] for token in range(8)])).logits[:, -1].softmax(-1).double()
    second = first @ after
    for place, probs in enumerate((first, second)):
        counts = torch.bincount(torch.tensor([answer.token_ids[place] for answer in answers]), minlength=8)
        assert chisquare(counts.tolist(), (1500 * probs / probs.sum()).tolist()).pvalue > 1e-3
    assert {token.provenance for answer in answers for token in answer.tokens} == {
        Provenance.MATCHED,
        Provenance.TARGET,
    }


def test_ends_inside_blocks_stop_texts_and_budgets():
    pair = pair_of(eos_token_id=9)
    for params in (
        SamplingParams(max_new_tokens=60, stop=("11 ", "3 4")),
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=60, ignore_eos=True),
        SamplingParams(max_new_tokens=60, eos_token_ids=(4, 5)),
    ):
        rule = rule_of("margin:delta=2")
        answers = together(pair, [(prompt, rule) for prompt in PROMPTS], params=params)
        decoder = pair.decoder(rule, num_draft_tokens=5)
        assert [facts(one) for one in answers] == [facts(decoder.generate(prompt, params)) for prompt in PROMPTS]


@pytest.mark.parametrize("draft_alone", [False, True])
def test_one_model_alone(draft_alone):
    pair = pair_of()
    requests = [(prompt, rule_of("lossless")) for prompt in PROMPTS]
    answers = together(pair, requests, num_draft_tokens=0, draft_alone=draft_alone)
    decoder = pair.decoder("draft_only" if draft_alone else "target_only")
    wanted = [decoder.generate(prompt, SamplingParams(max_new_tokens=24)).token_ids for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == wanted


def test_a_draft_with_more_columns():
    pair = pair_of(draft_columns=VOCAB_SIZE + 5)
    rule = rule_of("fuzzy:threshold=0.3")
    answers = together(pair, [(prompt, rule) for prompt in PROMPTS])
    decoder = pair.decoder(rule, num_draft_tokens=5)
    wanted = [decoder.generate(prompt, SamplingParams(max_new_tokens=24)).token_ids for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == wanted


def test_sampling_repeats_and_depends_on_the_seed():
    pair = pair_of()
    requests = [(prompt, rule_of(spec)) for prompt in PROMPTS for spec in ("lossless", "typical", "cascade:kind=tok")]

    def texts(seed):
        params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed)
        return [answer.token_ids for answer in together(pair, requests, params=params)]

    assert texts(1) == texts(1) != texts(2)


def test_bad_requests_are_refused_by_name():
    pair = pair_of()
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(SpecError, match="num_rows must be"):
        BatchedSpeculativeDecoder(pair, num_rows=0, num_draft_tokens=2, params=params)
    with pytest.raises(SpecError, match="needs exact verification"):
        BatchedSpeculativeDecoder(
            pair, num_rows=1, num_draft_tokens=2, params=params, rules=[parse_rule("lossless:verification=exact")]
        )
    rules, eagle = [rule_of("state_arbiter:path=memory,threshold=0.5", pair)], random_eagle(pair.target)
    with pytest.raises(SpecError, match="draft hidden states, which the eagle3 drafter does not have"):
        BatchedSpeculativeDecoder(pair, num_rows=1, num_draft_tokens=2, params=params, rules=rules, eagle=eagle)
    alone = Pair(pair.target, None, pair.tokenizer, "tiny/target", None)
    with pytest.raises(SpecError, match="the pair has no draft"):
        BatchedSpeculativeDecoder(alone, num_rows=1, num_draft_tokens=2, params=params)
    decoder = BatchedSpeculativeDecoder(pair, num_rows=2, num_draft_tokens=2, params=params)
    rule = parse_rule("lossless")
    with pytest.raises(SpecError, match="at least one token"):
        decoder.submit(Request([], rule, 4, print))
    with pytest.raises(SpecError):
        decoder.submit(Request([48], rule, 4, print))
    with pytest.raises(SpecError, match="max_new_tokens must be"):
        decoder.submit(Request([1], rule, 0, print))
    with pytest.raises(SpecError, match="rule must be one of lossless, got margin:delta=1"):
        decoder.submit(Request([1], parse_rule("margin"), 4, print))
    with pytest.raises(ContextOverflowError, match="need 330 positions"):
        decoder.submit(Request([1], rule, 329, print))
    assert decoder.idle


def test_blocks_stay_within_learned_positions():
    torch.manual_seed(0)
    target = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_positions=48, n_embd=32, n_layer=2, n_head=2)).eval()
    pair = Pair(target, perturbed(target, noise=0.3), NumberTokenizer(), "tiny/target", "tiny/draft")
    rule, params = rule_of("margin:delta=1"), SamplingParams(max_new_tokens=38, eos_token_ids=())
    prompts = [list(range(10)), [3, 4], list(range(5, 14))]
    answers = together(pair, [(prompt, rule) for prompt in prompts], params=params, num_draft_tokens=8)
    decoder = pair.decoder(rule, num_draft_tokens=8)
    assert [facts(one) for one in answers] == [facts(decoder.generate(prompt, params)) for prompt in prompts]
    assert len(answers[0].tokens) == 38  # up to the last position


def test_positions_that_depend_on_the_batch_are_refused():
    pair = pair_of()
    pair.target.config.rope_parameters = {"rope_type": "longrope"}
    with pytest.raises(UnsupportedModelError, match="llama has longrope rotary positions"):
        BatchedSpeculativeDecoder(pair, num_rows=1, num_draft_tokens=2, params=SamplingParams())


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (BloomForCausalLM, BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)),
        (
            FalconForCausalLM,
            FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
        ),
    ],
)
def test_biases_that_need_a_padding_mask_are_refused_in_batches(kind, config):
    target = kind(config).eval()
    pair = Pair(target, perturbed(target, noise=0.3), NumberTokenizer(), "tiny/target", "tiny/draft")
    params = SamplingParams(max_new_tokens=6, eos_token_ids=())
    assert len(pair.decoder("margin", num_draft_tokens=2).generate([3, 4], params).token_ids) == 6
    with pytest.raises(UnsupportedModelError, match=f"{config.model_type} cannot run in batches"):
        BatchedSpeculativeDecoder(pair, num_rows=1, num_draft_tokens=2, params=params)


def test_only_rows_with_a_text_are_read(monkeypatch):
    """On a CPU, texts move to the first rows as others end."""
    pair = pair_of()
    sizes = {"target": [], "draft": []}
    forward = RowModel.forward

    def read(self, token_ids, *args, **keywords):
        sizes["target" if self.model is pair.target else "draft"].append(len(token_ids))
        return forward(self, token_ids, *args, **keywords)

    monkeypatch.setattr(RowModel, "forward", read)
    rule, made = rule_of("lossless"), {}
    params = SamplingParams(max_new_tokens=24)
    decoder = BatchedSpeculativeDecoder(pair, num_rows=4, num_draft_tokens=3, params=params, rules=[rule])
    for number, limit in enumerate((1, 9, 1, 40)):
        decoder.submit(Request([5, number], rule, limit, lambda one, number=number: made.update({number: one})))
    while not decoder.idle:
        decoder.step()
    assert sizes["target"][:2] == [4, 2] and sizes["target"][-1] == sizes["draft"][-1] == 1
    alone = pair.decoder(rule, num_draft_tokens=3)
    for number, limit in enumerate((1, 9, 1, 40)):
        assert facts(made[number]) == facts(alone.generate([5, number], SamplingParams(max_new_tokens=limit)))


def test_forwards_over_all_rows_ignore_the_free_ones(monkeypatch):
    """As on a GPU, where texts stay in their rows."""
    in_progress = BatchedSpeculativeDecoder._in_progress
    monkeypatch.setattr(
        BatchedSpeculativeDecoder, "_in_progress", lambda self, _: in_progress(self, torch.device("cuda"))
    )
    pair, made = pair_of(), {}
    rules = [rule_of(spec, pair) for spec in ("lossless", "margin:delta=2")]
    params = SamplingParams(max_new_tokens=24)
    decoder = BatchedSpeculativeDecoder(pair, num_rows=4, num_draft_tokens=3, params=params, rules=rules)
    given = [(rules[number % 2], limit) for number, limit in enumerate((1, 9, 30, 40))]
    for number, (rule, limit) in enumerate(given):
        decoder.submit(Request([5, number], rule, limit, lambda one, number=number: made.update({number: one})))
    while not decoder.idle:
        decoder.step()
    for number, (rule, limit) in enumerate(given):
        alone = pair.decoder(rule, num_draft_tokens=3).generate([5, number], SamplingParams(max_new_tokens=limit))
        assert facts(made[number]) == facts(alone)


def test_a_dropped_answer_frees_its_row():
    pair = pair_of()
    params = SamplingParams(max_new_tokens=20, eos_token_ids=())
    decoder = BatchedSpeculativeDecoder(pair, num_rows=1, num_draft_tokens=2, params=params, rules=[rule_of("margin")])
    done = []
    requests = [Request([number, 4], rule_of("margin"), 20, done.append) for number in (3, 5, 6)]
    for request in requests:
        decoder.submit(request)
    decoder.step()
    decoder.drop(requests[0])
    decoder.drop(requests[2])
    while not decoder.idle:
        decoder.step()
    expected = pair.decoder(rule_of("margin"), num_draft_tokens=2).generate([5, 4], params)
    assert [one.token_ids for one in done] == [expected.token_ids]


def test_long_prompts_are_read_in_several_forwards(monkeypatch):
    monkeypatch.setattr("reprieve.models.row_model._PREFILL_TOKENS", 40)
    pair, rule = pair_of(), rule_of("lossless")
    answers = together(pair, [(prompt, rule) for prompt in PROMPTS * 2])
    decoder = pair.decoder(rule, num_draft_tokens=5)
    wanted = [facts(decoder.generate(prompt, SamplingParams(max_new_tokens=24))) for prompt in PROMPTS]
    assert [facts(answer) for answer in answers] == wanted * 2


def test_a_failed_forward_leaves_a_decoder_that_works(monkeypatch):
    pair = pair_of()
    rule = parse_rule("lossless")
    decoder = BatchedSpeculativeDecoder(pair, num_rows=2, num_draft_tokens=2, params=SamplingParams(max_new_tokens=6))
    made = []
    with monkeypatch.context() as broken:
        broken.setattr(torch.nn.Linear, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        decoder.submit(Request([1, 2], rule, 6, made.append))
        with pytest.raises(RuntimeError):
            decoder.step()
    decoder.clear()
    assert decoder.idle and not made
    decoder.submit(Request([1, 2], rule, 6, made.append))
    while not decoder.idle:
        decoder.step()
    assert len(made[0].tokens) == 6
