"""The decoding loop: exact budgets, ends inside blocks, streams, seeds, traces and error messages."""

from __future__ import annotations

import pytest
import torch

from reprieve.drafters import DraftModelDrafter, NgramDrafter, NgramSettings
from reprieve.drafters.length import FixedLength
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import ContextOverflowError, PairError, SpecError, UnsupportedModelError
from reprieve.models.cached_model import CachedModel
from reprieve.models.loading import require_same_tokenizer
from reprieve.rules import parse_rule
from reprieve.rules.base import Rule, Traits
from reprieve.types import Block, Need, Prefill, Provenance
from tests.kit.tiny import NumberTokenizer, ScriptedDrafter, perturbed, tiny_model

CPU = torch.device("cpu")
PROMPT = list(range(2, 22))


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def draft(target):
    return perturbed(target)


@pytest.fixture(scope="module")
def text(target):
    """Greedy output of the target alone."""
    return SpeculativeDecoder(CachedModel(target), None, NumberTokenizer()).generate(PROMPT).token_ids


def decoder(target, draft, *, rule="lossless", tokenizer=None, **keywords):
    drafter = DraftModelDrafter(CachedModel(draft), CPU)
    return SpeculativeDecoder(
        CachedModel(target), drafter, tokenizer or NumberTokenizer(), rule=parse_rule(rule), **keywords
    )


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 33])
def test_token_budget_is_exact(target, draft, text, max_new_tokens):
    for rule in ("lossless", "top_k:k=48"):
        answer = decoder(target, draft, rule=rule).generate(PROMPT, SamplingParams(max_new_tokens=max_new_tokens))
        assert len(answer.tokens) == max_new_tokens
        assert answer.finish_reason == "length"
        assert answer.num_drafted >= answer.num_accepted


def test_accepting_everything_gives_k_plus_one_tokens_per_round(target, draft):
    answer = decoder(target, draft, rule="top_k:k=48", num_draft_tokens=4).generate(
        PROMPT, SamplingParams(max_new_tokens=50)
    )
    assert answer.tokens_per_round == 5.0
    assert [token.provenance for token in answer.tokens[4::5]] == [Provenance.TARGET] * 10


def test_end_of_text_inside_an_accepted_block_ends_the_answer_there(target, text):
    position = next(i for i in range(3, 40) if text[i] not in text[:i])
    scripted = ScriptedDrafter(lambda ids, depth: Block.chain(torch.tensor(text[len(ids) - 20 :][:depth])))
    tokenizer = NumberTokenizer(eos_token_id=text[position])
    model = SpeculativeDecoder(CachedModel(target), scripted, tokenizer, num_draft_tokens=48)
    answer = model.generate(PROMPT)
    assert answer.token_ids == text[: position + 1]
    assert answer.finish_reason == "eos"
    assert answer.num_rounds == 1
    assert tokenizer.decode(answer.token_ids[:-1]) == answer.text, "the end-of-text token is no text"
    longer = model.generate(PROMPT, SamplingParams(ignore_eos=True))
    assert longer.token_ids == text


def test_stop_text_inside_a_block_ends_tokens_and_text(target, draft, text):
    words = NumberTokenizer().decode(text)
    stop = f" {text[5]} {text[6]} "
    end = words.find(stop)
    answer = decoder(target, draft).generate(PROMPT, SamplingParams(stop=("never", stop)))
    assert answer.finish_reason == "stop"
    assert answer.text == words[:end]
    assert words.startswith(answer.text + stop)
    assert NumberTokenizer().decode(answer.token_ids).endswith(stop)


def test_the_stream_adds_up_to_the_text_and_holds_back_a_partial_stop(target, draft, text):
    pieces = []
    answer = decoder(target, draft).generate(PROMPT, on_token=lambda token, piece: pieces.append((token, piece)))
    assert [token for token, _ in pieces] == answer.tokens
    assert "".join(piece for _, piece in pieces) == answer.text == NumberTokenizer().decode(text)
    half = []
    stop = f"{text[4]} {text[5]} no"
    decoder(target, draft).generate(
        PROMPT, SamplingParams(max_new_tokens=8, stop=(stop,)), on_token=lambda _, piece: half.append(piece)
    )
    assert half[4] == "", "text that may begin a stop waits"
    assert "".join(half) == NumberTokenizer().decode(text[:8])


def test_the_seed_determines_the_answer(target, draft):
    model = decoder(target, draft, rule="random:rate=0.5")
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=40) for seed in (1, 1, 2)]
    answers = [model.generate(PROMPT, p).token_ids for p in params]
    assert answers[0] == answers[1] != answers[2]


def test_a_trace_holds_every_round_and_is_off_by_default(target, draft):
    model = decoder(target, draft, rule="top_k:k=3", num_draft_tokens=5)
    assert model.generate(PROMPT, SamplingParams(max_new_tokens=30)).trace is None
    answer = model.generate(PROMPT, SamplingParams(max_new_tokens=30), trace=True)
    assert len(answer.trace) == answer.num_rounds
    assert [token for entry in answer.trace for token in entry.committed] == answer.tokens
    for entry in answer.trace:
        assert len(entry.risks or []) == len(entry.drafted_ids) == len(entry.target_ids)
        for place, node in enumerate(entry.path[: len(entry.committed) - 1]):
            kind = entry.committed[place].provenance
            assert kind is (Provenance.MATCHED if entry.lossless_accepts[node] else Provenance.RESCUED)


def test_rescued_token_survives_commit(target, draft):
    model = decoder(target, draft, rule="top_k:k=48", num_draft_tokens=6)
    answer = model.generate(PROMPT, SamplingParams(max_new_tokens=36))
    assert answer.num_rescued > 0
    kept = model.target.cached_ids
    assert kept == [*PROMPT, *answer.token_ids][: len(kept)]
    with torch.inference_mode():
        logits = target(torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0]
    for place, token in enumerate(answer.tokens):
        if token.provenance is Provenance.RESCUED:
            assert int(logits[len(PROMPT) + place - 1].argmax()) != token.token_id
        if token.provenance is not Provenance.RESCUED:
            assert int(logits[len(PROMPT) + place - 1].argmax()) == token.token_id


def test_the_ngram_drafter_proposes_the_tokens_that_followed_last_time():
    drafter = NgramDrafter(CPU, NgramSettings(max_ngram=2))
    drafter.start([1, 2, 3, 4, 9, 1, 2], None, Prefill())
    assert drafter.propose(3, FixedLength(3)).token_ids.tolist() == [3, 4, 9]
    drafter.start([5, 6, 7], None, Prefill())
    assert drafter.propose(3, FixedLength(3)).num_tokens == 0


def test_per_request_dial_changes_one_answer_only(target, draft):
    model = decoder(target, draft, rule="top_k:k=2")
    short = SamplingParams(max_new_tokens=40)
    plain = model.generate(PROMPT, short).num_rescued
    assert model.generate(PROMPT, short, dial=1).num_rescued == 0
    assert model.generate(PROMPT, short, dial=48).num_rescued > plain
    assert model.generate(PROMPT, short).num_rescued == plain


def test_a_decoder_that_is_in_use_refuses_a_second_answer(target, draft):
    model = decoder(target, draft)
    short = SamplingParams(max_new_tokens=20)
    before = model.generate(PROMPT, short).token_ids
    with pytest.raises(SpecError, match="generating an answer already: give each thread a decoder of its own"):
        model.generate(PROMPT, short, on_token=lambda token, text: model.generate(PROMPT))
    assert model.generate(PROMPT, short).token_ids == before, "an error ends the use"


@pytest.mark.parametrize(("prompt", "message"), [(b"text", "a text or token ids"), ("\ud800", "valid Unicode")])
def test_prompts_that_cannot_be_encoded_are_refused(target, draft, prompt, message):
    with pytest.raises(SpecError, match=message):
        decoder(target, draft).generate(prompt)


class ToyAdvisor:
    """Advise 0 for even tokens and 1 for odd ones, and record the tokens of the text."""

    def __init__(self):
        self.seen = []

    def start(self, prompt_ids, *, max_length, num_draft_tokens):
        self.seen = list(prompt_ids)

    def advise(self, block, evidence, settled):
        return (block.token_ids % 2).float()

    def commit(self, token_ids):
        self.seen += token_ids


class ToyArbiter(Rule):
    """Rescue tokens whose advice is at most 0.5."""

    name = "toy"
    own_traits = Traits(needs=frozenset({Need.ADVICE, Need.NODE_HIDDEN}))
    threshold = 0.5

    def risk(self, evidence):
        assert evidence.node_hidden[-1].shape == (len(evidence.token_ids), 32)
        return evidence.advice


def test_an_advisor_gets_one_call_a_round_and_hidden_states_encode_the_nodes(target, draft):
    advisor = ToyAdvisor()
    model = SpeculativeDecoder(
        CachedModel(target, hidden_layers=(-1,)),
        DraftModelDrafter(CachedModel(draft), CPU),
        NumberTokenizer(),
        rule=ToyArbiter(),
        advisor=advisor,
    )
    answer = model.generate(PROMPT, SamplingParams(max_new_tokens=40), trace=True)
    assert advisor.seen[: len(PROMPT) + 40] == [*PROMPT, *answer.token_ids]
    rescued = [t.token_id for t in answer.tokens if t.provenance is Provenance.RESCUED]
    assert rescued
    assert all(token_id % 2 == 0 for token_id in rescued)
    with torch.inference_mode():
        cached = CachedModel(target, hidden_layers=(1, -1))
        cached.start(PROMPT)
        _, hidden = cached.forward([30, 31, 32])
        whole = target(torch.tensor([[*PROMPT, 30, 31, 32]]), output_hidden_states=True).hidden_states
    assert list(hidden) == [1, -1]
    for layer, states in hidden.items():
        torch.testing.assert_close(states, whole[layer][0, -3:], rtol=1e-3, atol=1e-4)


def test_prefix_reuse_reads_only_new_tokens(target):
    model = CachedModel(target)
    calls = []
    original = model._run
    model._run = lambda ids, **extra: (calls.append(len(ids)), original(ids, **extra))[1]
    with torch.inference_mode():
        model.start(PROMPT)
        model.start([*PROMPT[:15], 40, 41], reuse_prefix=True)
    assert calls == [20, 2]
    assert model.cached_ids == [*PROMPT[:15], 40, 41]


def count_tokens(model, monkeypatch):
    """Count the tokens that a cached model reads."""
    counts = []
    run = model._run

    def counted(token_ids, **keywords):
        counts.append(len(token_ids))
        return run(token_ids, **keywords)

    monkeypatch.setattr(model, "_run", counted)
    return counts


@pytest.mark.parametrize("rule", ["lossless", "margin:delta=1"])
def test_a_shared_prefix_is_read_once_and_changes_no_answer(target, draft, monkeypatch, rule):
    prompts = [[*PROMPT, 30 + number, 7] for number in range(3)]
    short = SamplingParams(max_new_tokens=12)
    whole = [decoder(target, draft, rule=rule).generate(prompt, short) for prompt in prompts]
    shared = decoder(target, draft, rule=rule)
    shared.share_prefix(PROMPT)
    for _ in range(2):
        assert [shared.generate(prompt, short).token_ids for prompt in prompts] == [one.token_ids for one in whole]
    models = shared.target, shared.drafter.model
    for model in models:
        counts = count_tokens(model, monkeypatch)
        shared.generate(prompts[0], SamplingParams(max_new_tokens=2))
        assert sum(counts) < len(PROMPT), "only what follows the prefix"
        counts.clear()
    others = [PROMPT[:5], PROMPT, [*PROMPT[:5], 40, 41, 42]]  # too short, and another beginning
    for other in others:
        fresh = decoder(target, draft, rule=rule)
        assert shared.generate(other, short).token_ids == fresh.generate(other, short).token_ids
    counts = count_tokens(shared.target, monkeypatch)
    assert shared.generate(prompts[1], short).token_ids == whole[1].token_ids
    assert counts[0] == len(PROMPT), "read again, by a forward of its own"


def test_one_model_alone_reads_a_shared_prefix_once(target, monkeypatch):
    alone = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer())
    alone.share_prefix(PROMPT)
    counts = count_tokens(alone.target, monkeypatch)
    for number in (30, 31):
        answer = alone.generate([*PROMPT, number], SamplingParams(max_new_tokens=4))
        fresh = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer())
        assert answer.token_ids == fresh.generate([*PROMPT, number], SamplingParams(max_new_tokens=4)).token_ids
    assert counts == [len(PROMPT), *[1] * 8]


@pytest.mark.parametrize("num_draft_tokens", [0, -1, 513])
def test_k_out_of_range_is_refused(target, draft, num_draft_tokens):
    with pytest.raises(SpecError, match=r"num_draft_tokens must be a whole number in \[1, 512\]"):
        decoder(target, draft, num_draft_tokens=num_draft_tokens)


def test_context_overflow_names_the_limit(target, draft):
    with pytest.raises(ContextOverflowError, match=r"need 340 positions.*has 320"):
        decoder(target, draft).generate(PROMPT, SamplingParams(max_new_tokens=320))


def test_missing_inputs_are_refused_at_construction(target):
    with pytest.raises(UnsupportedModelError, match="needs the target's hidden states of layer -1"):
        SpeculativeDecoder(CachedModel(target), None, NumberTokenizer(), rule=ToyArbiter(), advisor=ToyAdvisor())
    with pytest.raises(SpecError, match="needs draft probabilities"):
        SpeculativeDecoder(CachedModel(target), NgramDrafter(CPU), NumberTokenizer(), rule=parse_rule("fuzzy"))
    with pytest.raises(UnsupportedModelError, match=r"hidden layer must be in \[-3, 2\].*got 7"):
        CachedModel(target, hidden_layers=(7,))
    with pytest.raises(SpecError, match="at least one token"):
        SpeculativeDecoder(CachedModel(target), None, NumberTokenizer()).generate([])


def test_different_tokenizers_are_named():
    with pytest.raises(PairError, match=r"'big' \(48 tokens\) and draft 'small' \(40 tokens\).*8 tokens differ"):
        require_same_tokenizer(NumberTokenizer(48), NumberTokenizer(40), "big", "small")


def test_recurrent_models_are_refused():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(UnsupportedModelError, match="rolled back"):
        CachedModel(model)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens must be in \[1, 2147483647\], got 0"),
        ({"temperature": -1.0}, r"temperature must be in \[0, 1e\+06\], got -1.0"),
        ({"temperature": float("inf")}, r"temperature must be in \[0, 1e\+06\], got inf"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_k": -1}, r"top_k must be in \[0, 2147483647\], got -1"),
        ({"stop": ("",)}, "stop must hold texts"),
    ],
)
def test_bad_sampling_parameters_are_named(bad, says):
    with pytest.raises(SpecError, match=says):
        SamplingParams(**bad)


def test_transformers_generate_uses_the_engine(target, draft, text):
    from reprieve import custom_generate

    ids = torch.tensor([PROMPT])
    common = {"custom_generate": custom_generate, "do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
    for extra in ({"draft_model": draft}, {}):
        output = target.generate(ids, **common, **extra)
        assert output[0].tolist() == [*PROMPT, *text[:40]]
    relaxed = target.generate(ids, **common, draft_model=draft, rule="top_k:k=48", num_draft_tokens=4)
    assert relaxed[0].tolist() != [*PROMPT, *text[:40]]
    with pytest.raises(SpecError, match="batch size must be 1, got 2"):
        target.generate(torch.tensor([PROMPT, PROMPT]), **common)


def test_half_a_character_waits_for_the_rest():
    from reprieve.engine.text import TextStream

    class Bytes:
        def decode(self, ids, *, skip_special_tokens=False):
            return bytes(ids).decode("utf-8", errors="replace")

    stream = TextStream(Bytes())
    assert [stream.push(byte) for byte in "aé€b".encode()] == ["a", "", "é", "", "", "€", "b"]
