"""Parser of rule specifications: `fuzzy:divergence=js,threshold=0.3`, `top_k:k=4&floor:min_prob=0.01`.

Grammar: `name:parameter=value,...`; `a&b` rescues tokens that both rescue, `a|b` tokens that either one rescues (`&`
binds tighter). With `start=` and `end=`, a rescuing rule applies only between these two markers in the text. `span=`
chooses the markers instead: `thinking` and `tool_calls` use those of the model's tokenizer, the name of a model family
uses that family's thinking markers. With `outside=true`, the rule applies everywhere else. With `strict_first=16`, the
first 16 tokens of an answer are decoded losslessly.
"""

from __future__ import annotations

from reprieve.errors import SpecError, require_choice
from reprieve.rules.base import RULES, Rule
from reprieve.rules.compose import AllOf, AnyOf
from reprieve.rules.spans import MODEL_SPANS, SPANS, InsideSpan, StrictFirst
from reprieve.specs import construct, parse_spec, split


def parse_rule(spec: str) -> Rule:
    """Return the rule described by a specification.

    Raises:
        SpecError: unknown rule or parameter, or a value that cannot be read or is out of range; the message lists
            what is known.
    """
    if not spec.strip():
        raise SpecError(f"rule must be one of {', '.join(RULES.names())}, got an empty text")
    if spec.count('"') % 2:
        raise SpecError(f"rule {spec!r}: a double quote is not closed")
    either = [_parse_all(part) for part in split(spec, "|")]
    return either[0] if len(either) == 1 else AnyOf(tuple(either))


def _parse_all(spec: str) -> Rule:
    both = [_parse_one(part.strip()) for part in split(spec, "&")]
    return both[0] if len(both) == 1 else AllOf(tuple(both))


def _parse_one(spec: str) -> Rule:
    name, given = parse_spec(spec, what="rule")
    markers = {key: given.pop(key) for key in ("start", "end", "span", "outside") if key in given}
    num_strict = given.pop("strict_first", None)
    rule: Rule = construct(RULES.get(name), given, where=f"rule {name}")
    if markers:
        rule = _in_span(rule, **markers)
    if num_strict is None:
        return rule
    if not num_strict.isdecimal():
        raise SpecError(f"strict_first must be a whole number of tokens, 1 or more, got {num_strict!r}")
    return StrictFirst(rule, int(num_strict))


def _in_span(
    rule: Rule, *, start: str = "", end: str = "", span: str | None = None, outside: str | None = None
) -> InsideSpan:
    if outside not in (None, "true", "false"):
        raise SpecError(f"outside must be true or false, got {outside!r}")
    if span is None or span in MODEL_SPANS:
        return InsideSpan(rule, start=start, end=end, outside=outside == "true", span=span)
    require_choice("span", span, (*MODEL_SPANS, *SPANS))
    if start or end:
        raise SpecError("give span, or start and end, not both")
    start, end = SPANS[span]
    return InsideSpan(rule, start=start, end=end, outside=outside == "true")
