"""Specifications round-trip, whatever they contain."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprieve.errors import SpecError
from reprieve.rules import parse_rule
from reprieve.rules.compose import AllOf, AnyOf, InsideSpan, StrictFirst
from reprieve.rules.fuzzy import FuzzyRule
from reprieve.rules.margin import FloorRule, MarginRule
from reprieve.rules.top_k import TopKRule
from reprieve.rules.typical import TypicalRule
from reprieve.specs import construct, format_spec, parse_spec, split


@dataclass(frozen=True)
class Record:
    number: float = 1.0
    count: int = 0
    limit: int | None = None
    flag: bool = False
    lambda_: float = 0.5
    text: str = ""


numbers = st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
records = st.builds(
    Record,
    number=numbers,
    count=st.integers(),
    limit=st.none() | st.integers(),
    flag=st.booleans(),
    lambda_=numbers,
    text=texts,
)


@given(records)
def test_records_round_trip_through_their_specification(record):
    name, given_ = parse_spec(format_spec("thing", record), what="thing")
    assert name == "thing"
    assert construct(Record, given_, where="thing") == record


@given(st.lists(st.text(st.sampled_from('ab,|"')), min_size=1), st.sampled_from(",|"))
def test_splitting_and_joining_are_inverse(parts, sign):
    text = sign.join(parts)
    assert sign.join(split(text, sign)) == text


shares = st.floats(0.0, 1.0, allow_nan=False)
rescuing = st.one_of(
    st.builds(TopKRule, k=st.integers(1, 100)),
    st.builds(MarginRule, delta=st.floats(0, 50), k=st.none() | st.integers(1, 50)),
    st.builds(TypicalRule, epsilon=st.floats(0.001, 1.0), delta=st.floats(0.001, 1.0)),
    st.builds(FloorRule, min_prob=shares),
)
markers = texts.filter(lambda text: bool(text) and text.lower() != "none")
in_span = (
    rescuing
    | st.builds(InsideSpan, rescuing, start=markers, end=markers)
    | st.builds(InsideSpan, rescuing, span=st.sampled_from(["thinking", "tool_calls"]), outside=st.booleans())
)
in_span = in_span | st.builds(StrictFirst, in_span, strict_first=st.integers(1, 100))
composed = st.one_of(
    in_span,
    st.builds(FuzzyRule, threshold=shares, divergence=st.sampled_from(["kl", "js", "tv"])),
    st.builds(lambda parts: AllOf(tuple(parts)), st.lists(in_span, min_size=2, max_size=3)),
    st.builds(lambda a, b, c: AnyOf((AllOf((a, b)), c)), in_span, in_span, in_span),
)


@given(composed)
def test_rules_round_trip_through_their_specification(rule):
    assert parse_rule(rule.spec) == rule


@given(st.text(max_size=30))
def test_any_text_is_a_rule_or_raises_a_spec_error(text):
    with contextlib.suppress(SpecError):
        parse_rule(text)


@pytest.mark.parametrize("text", ["a:b", "a:=1", "a:b=1,b=2", 'a:b="1'])
def test_malformed_specifications_are_refused_by_name(text):
    with pytest.raises(SpecError, match="thing a"):
        parse_spec(text, what="thing")
