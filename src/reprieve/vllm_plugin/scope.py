"""Markers of a model's spans, in rules."""

from __future__ import annotations

import dataclasses

from reprieve.rules import InsideSpan, Rule
from reprieve.rules.compose import Wrapper


def with_markers(rule: Rule, span: str, markers: tuple[str, str]) -> Rule:
    """Return the rule with explicit markers in place of the model-specific `span`."""
    if isinstance(rule, InsideSpan) and rule.span == span:
        return dataclasses.replace(rule, start=markers[0], end=markers[1], span=None)
    if isinstance(rule, Wrapper):
        return rule.with_parts([with_markers(part, span, markers) for part in rule.parts])
    return rule
