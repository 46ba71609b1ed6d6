"""From the text of the command line to a rule: `fuzzy:divergence=js,threshold=0.3`, `top_k:k=4&floor:min_prob=0.01`.

Grammar: `name:parameter=value,...`; `a&b` rescues what both rescue, `a|b` what either does (`&` binds tighter). Any
rule that rescues takes `start=` and `end=`, or `span=` with the name of a model family that thinks, and then holds only
between these two markers in the text; with `outside=true` everywhere else.
"""

from __future__ import annotations

from reprieve.errors import SpecError, require_choice
from reprieve.rules.base import RULES, Rule
from reprieve.rules.compose import SPANS, AllOf, AnyOf, InsideSpan
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
    start, end, span = (given.pop(key, None) for key in ("start", "end", "span"))
    outside = given.pop("outside", None)
    rule: Rule = construct(RULES.get(name), given, where=f"rule {name}")
    if outside not in (None, "true", "false"):
        raise SpecError(f"outside must be true or false, got {outside!r}")
    if span is not None:
        require_choice("span", span, tuple(SPANS))
        if start is not None or end is not None:
            raise SpecError("give span, or start and end, not both")
        start, end = SPANS[span]
    if start is None and end is None and outside is None:
        return rule
    return InsideSpan(rule, start=start or "", end=end or "", outside=outside == "true")
