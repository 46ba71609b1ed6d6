"""Restrictions that a policy puts on its rule: only inside or outside a span, or not in an answer's first tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reprieve.errors import SpecError, require_choice, require_whole
from reprieve.rules import InsideSpan, Rule, StrictFirst
from reprieve.rules.compose import Wrapper, restricted
from reprieve.rules.spans import MODEL_SPANS, SPANS

SPAN, STRICT_IN, STRICT_FIRST = "span", "strict_in", "strict_first"
STRUCTURED = "strict_structured_outputs"
KEYS = (SPAN, STRICT_IN, STRICT_FIRST, STRUCTURED)


def restrict(rule: Rule, settings: Mapping[str, Any]) -> Rule:
    """Return the rule, restricted by a policy's keys.

    Args:
        settings: optional keys: `span` (apply the rule only inside it), `strict_in` (apply it only outside) and
            `strict_first` (number of an answer's first tokens that are decoded losslessly).

    Raises:
        SpecError: a value that is not allowed, or a rule that cannot be restricted.
    """
    span, strict_in, num_strict = (settings.get(key) for key in (SPAN, STRICT_IN, STRICT_FIRST))
    if span is not None and strict_in is not None:
        raise SpecError(f"give {SPAN} or {STRICT_IN}, not both: outside of {SPAN} decoding is lossless already")
    if span is not None or strict_in is not None:
        key = SPAN if strict_in is None else STRICT_IN
        named = _span(key, span if strict_in is None else strict_in)
        rule = restricted(rule, lambda part: _in_span(part, outside=strict_in is not None, **named))
    if num_strict is None:
        return rule
    require_whole(STRICT_FIRST, num_strict, 1)
    return restricted(rule, lambda part: StrictFirst(part, num_strict))


def flag(settings: Mapping[str, Any], key: str) -> bool:
    """A switch of the configuration; off where it is not given.

    Raises:
        SpecError: neither true nor false.
    """
    value = settings.get(key, False)
    if not isinstance(value, bool):
        raise SpecError(f"{key} must be true or false, got {value!r}")
    return value


def with_markers(rule: Rule, span: str, markers: tuple[str, str]) -> Rule:
    """Return the rule with explicit markers in place of the model-specific `span`."""
    if isinstance(rule, InsideSpan) and rule.span == span:
        return dataclasses.replace(rule, start=markers[0], end=markers[1], span=None)
    if isinstance(rule, Wrapper):
        return rule.with_parts([with_markers(part, span, markers) for part in rule.parts])
    return rule


def _span(key: str, value: Any) -> dict[str, str]:
    """Fields of `InsideSpan`."""
    if isinstance(value, Mapping):
        if set(value) != {"start", "end"} or not all(isinstance(text, str) and text for text in value.values()):
            example = '{"start": "<think>", "end": "</think>"}'
            raise SpecError(f"{key} must name both markers, as {example}, got {value!r}")
        return {"start": value["start"], "end": value["end"]}
    require_choice(key, value, (*MODEL_SPANS, *SPANS))
    return {"span": value} if value in MODEL_SPANS else dict(zip(("start", "end"), SPANS[value], strict=True))


def _in_span(rule: Rule, *, outside: bool, **named: str) -> Rule:
    if isinstance(rule, StrictFirst):  # specifications name the span first
        return rule.with_parts([_in_span(rule.rule, outside=outside, **named)])
    if isinstance(rule, InsideSpan):
        raise SpecError(f"rule {rule.spec!r} has a span already: name it in the rule or next to it, not in both")
    start, end = named.get("start", ""), named.get("end", "")
    return InsideSpan(rule, start=start, end=end, outside=outside, span=named.get("span"))
