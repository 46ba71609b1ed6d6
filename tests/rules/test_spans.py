"""Rules restricted to a part of the text: inside thinking, outside tool calls, after an answer's first tokens."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from reprieve.drafters import DraftModelDrafter
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.models.cached_model import CachedModel
from reprieve.rules import InsideSpan, StrictFirst, parse_rule
from reprieve.rules.spans import model_markers, span_is_open
from reprieve.types import ROOT, Context, Provenance
from tests.kit.chats import byte_tokenizer
from tests.kit.tiny import NumberTokenizer, perturbed, tiny_model
from tests.rules.test_rules import bound, evidence

PROMPT = list(range(2, 22))


class Vocabulary:
    """A tokenizer with some texts as tokens, which splits all others into characters."""

    def __init__(self, *known):
        self.known = known

    def __len__(self):
        return len(self.known) + 256

    def encode(self, text, *, add_special_tokens):
        return [self.known.index(text)] if text in self.known else [len(self.known) + ord(sign) % 256 for sign in text]

    def decode(self, token_ids):
        return "".join(self.known[token_id] if token_id < len(self.known) else "?" for token_id in token_ids)


@pytest.mark.parametrize(
    ("known", "markers"),
    [
        (("<think>", "</think>"), ("<think>", "</think>")),
        (("[THINK]", "[/THINK]", "<think>"), ("[THINK]", "[/THINK]")),
        (("<|channel>", "<channel|>"), ("<|channel>", "<channel|>")),
        (("<think>", "</think>", "<mm:think>", "</mm:think>"), ("<mm:think>", "</mm:think>")),
        (("<|channel|>", "<|message|>", "<|end|>"), ("<|channel|>analysis<|message|>", "<|end|>")),
    ],
)
def test_thinking_markers_are_the_tokenizers_own(known, markers):
    assert model_markers("thinking", Vocabulary(*known)) == markers


def last_in(text, marker):
    """Index just past the marker's last occurrence in a list, or -1."""
    ends = range(len(marker), len(text) + 1)
    return max((end for end in ends if text[end - len(marker) : end] == list(marker)), default=-1)


@pytest.mark.parametrize("seed", range(40))
def test_spans_are_followed_along_every_branch_of_every_text(seed):
    """Random texts, trees and overlapping markers of one to three tokens, against a search of each path."""
    draw = random.Random(seed)
    markers = [[draw.randrange(3) for _ in range(draw.randint(1, 3))] for _ in range(2)]
    lengths = [draw.randint(1, 9) for _ in range(4)]
    texts = [[draw.randrange(3) for _ in range(length)] for length in lengths]
    parents, rows, paths = [], [], []
    for node in range(20):
        parent = draw.randint(-1, node - 1)
        parents.append(parent)
        rows.append(draw.randrange(4) if parent == ROOT else rows[parent])
    token_ids = [draw.randrange(3) for _ in parents]
    for parent, row in zip(parents, rows, strict=True):
        paths.append(texts[row] if parent == ROOT else [*paths[parent], token_ids[parent]])
    case = dataclasses.replace(
        evidence(greedy=True, size=20),
        token_ids=torch.tensor(token_ids),
        parents=parents,
        context=Context(torch.tensor([[*text, *[0] * (9 - len(text))] for text in texts]), torch.tensor(lengths)),
        context_rows=rows,
    )
    found = span_is_open(case, *markers).tolist()
    # A token that completes both markers closes the span.
    assert found == [last_in(path, markers[0]) > last_in(path, markers[1]) for path in paths]


@pytest.mark.parametrize("known", [(), ("<think>",), ("</think>",)])
def test_a_model_that_has_no_markers_is_refused(known):
    rule = parse_rule("margin:delta=3,span=thinking")
    with pytest.raises(SpecError, match=r"span thinking: the tokenizer has no tokens for it .*start= and end="):
        rule.bind(Vocabulary(*known))


def test_a_token_for_unknown_text_is_no_marker():
    class Unknown(Vocabulary):
        def encode(self, text, *, add_special_tokens):
            return [len(self.known)]

    with pytest.raises(SpecError, match="no tokens for it"):
        model_markers("thinking", Unknown())


def test_a_real_tokenizer_gives_its_thinking_markers():
    tokenizer = byte_tokenizer()
    rule = parse_rule("top_k:k=4,span=thinking").bind(tokenizer)
    assert (rule.start_ids, rule.end_ids) == tuple(
        (tokenizer.convert_tokens_to_ids(mark),) for mark in ("<think>", "</think>")
    )
    with pytest.raises(SpecError, match="span tool_calls"):
        parse_rule("top_k:k=4,span=tool_calls,outside=true").bind(tokenizer)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("margin:span=thinking,start=a", "give span, or start and end"),
        ("margin:strict_first=0", "strict_first must be 1 or more"),
        ("margin:strict_first=-1", "strict_first must be 1 or more"),
        ("margin:strict_first=1.5", "strict_first must be a whole number"),
        ("fuzzy:strict_first=4", "takes rules that rescue"),
        ("lossless:strict_first=4", "takes rules that rescue"),
        ("margin:span=answers", "span must be one of thinking, tool_calls, got"),
    ],
)
def test_invalid_restrictions_are_refused(spec, said):
    with pytest.raises(SpecError, match=said):
        parse_rule(spec)


def test_restrictions_combine_and_round_trip():
    rule = parse_rule("top_k:k=3,span=thinking,strict_first=16")
    assert isinstance(rule, StrictFirst) and isinstance(rule.rule, InsideSpan)
    assert rule.spec == "top_k:k=3,span=thinking,strict_first=16" and parse_rule(rule.spec) == rule
    assert rule.with_dial(5).spec == "top_k:k=5,span=thinking,strict_first=16"
    assert rule.spec_without_dial == "top_k:span=thinking,strict_first=16"


def test_the_first_tokens_of_an_answer_are_strict():
    rule, plain = bound("margin:delta=9,strict_first=3"), bound("margin:delta=9")
    case = dataclasses.replace(evidence(greedy=True, size=5), answer_positions=torch.tensor([1, 2, 3, 4, 2]))
    risk = rule.risk(case)
    assert torch.isinf(risk).tolist() == [True, True, False, False, True]
    assert torch.equal(risk[2:4], plain.risk(case)[2:4])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_local_engine_rescues_only_after_the_strict_tokens(temperature):
    target = tiny_model()
    answers = {}
    for spec in ("lossless", "top_k:k=48", "top_k:k=48,strict_first=8"):
        drafter = DraftModelDrafter(CachedModel(perturbed(target)), torch.device("cpu"))
        decoder = SpeculativeDecoder(
            CachedModel(target), drafter, NumberTokenizer(), rule=parse_rule(spec), num_draft_tokens=3
        )
        answers[spec] = decoder.generate(PROMPT, SamplingParams(max_new_tokens=40, temperature=temperature, seed=1))
    strict, everywhere, restricted = answers.values()
    rescued = [place for place, token in enumerate(restricted.tokens) if token.provenance is Provenance.RESCUED]
    assert rescued and min(rescued) >= 8
    assert any(token.provenance is Provenance.RESCUED for token in everywhere.tokens[:8])
    if temperature == 0:
        assert restricted.token_ids[:8] == strict.token_ids[:8] != everywhere.token_ids[:8]
