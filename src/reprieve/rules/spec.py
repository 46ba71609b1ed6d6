"""From the text of the command line to a rule: `fuzzy:divergence=js,threshold=0.3`, `top_k:k=4&floor:min_prob=0.01`.

Grammar: `name:parameter=value,...`; `a&b` rescues what both rescue, `a|b` what either does (`&` binds tighter). Any
rule that rescues takes `start=` and `end=` and then holds only between these two markers in the text; a marker that
holds one of the signs `,|&=:` stands in double quotes.
"""

from __future__ import annotations

import types
import typing
from typing import Any

from reprieve.errors import SpecError
from reprieve.rules.arbiter import ArbiterRule
from reprieve.rules.asd import AsdRule
from reprieve.rules.base import Rule, parameters_of
from reprieve.rules.cascades import CascadeRule
from reprieve.rules.compose import AllOf, AnyOf, InsideSpan
from reprieve.rules.fly import FlyRule
from reprieve.rules.fuzzy import FuzzyRule
from reprieve.rules.learned import JudgeRule, PivotRule
from reprieve.rules.lenience import LenienceRule
from reprieve.rules.lossless import LosslessRule
from reprieve.rules.lts import LtsRule
from reprieve.rules.margin import FloorRule, MarginRule, RatioRule
from reprieve.rules.math_symbols import MathSymbolsRule
from reprieve.rules.random_acceptance import RandomRule
from reprieve.rules.top_k import TopKRule
from reprieve.rules.typical import TypicalRule

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        LosslessRule,
        TopKRule,
        TypicalRule,
        MarginRule,
        RatioRule,
        FloorRule,
        LenienceRule,
        FuzzyRule,
        RandomRule,
        FlyRule,
        AsdRule,
        CascadeRule,
        MathSymbolsRule,
        JudgeRule,
        PivotRule,
        LtsRule,
        ArbiterRule,
    )
}


def parse_rule(spec: str) -> Rule:
    """The rule a specification describes.

    Raises:
        SpecError: unknown rule or parameter, or a value that cannot be read or is out of range; the message lists
            what is known.
    """
    if not spec.strip():
        raise SpecError(f"rule must be one of {', '.join(RULES)}, got an empty text")
    if spec.count('"') % 2:
        raise SpecError(f"rule {spec!r}: a double quote is not closed")
    either = [_parse_all(part) for part in _split(spec, "|")]
    return either[0] if len(either) == 1 else AnyOf(tuple(either))


def _parse_all(spec: str) -> Rule:
    both = [_parse_one(part.strip()) for part in _split(spec, "&")]
    return both[0] if len(both) == 1 else AllOf(tuple(both))


def _parse_one(spec: str) -> Rule:
    name, _, rest = spec.partition(":")
    if name not in RULES:
        raise SpecError(f"rule must be one of {', '.join(RULES)}, got {name!r}")
    given = parse_parameters(rest, where=f"rule {name}")
    start, end = given.pop("start", None), given.pop("end", None)
    rule = RULES[name](**convert_parameters(RULES[name], given, where=f"rule {name}"))
    if start is None and end is None:
        return rule
    return InsideSpan(rule, start=start or "", end=end or "")


def parse_parameters(text: str, *, where: str) -> dict[str, str]:
    """`a=1,b=x` as a dictionary of texts.

    Raises:
        SpecError: a part without `=`, or a parameter given twice.
    """
    given: dict[str, str] = {}
    for part in filter(None, _split(text, ",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise SpecError(f"{where}: parameters are written name=value, got {part!r}")
        if key.strip() in given:
            raise SpecError(f"{where}: parameter {key.strip()} is given twice")
        given[key.strip()] = value.strip().removeprefix('"').removesuffix('"')
    return given


def _split(text: str, sign: str) -> list[str]:
    """Split at a sign, but not inside double quotes."""
    parts, inside = [""], False
    for character in text:
        inside ^= character == '"'
        if character == sign and not inside:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def convert_parameters(kind: type, given: dict[str, str], *, where: str) -> dict[str, Any]:
    """Texts to the types of the dataclass `kind`'s fields.

    Raises:
        SpecError: an unknown parameter, or a value of the wrong type.
    """
    known = parameters_of(kind)
    hints = typing.get_type_hints(kind)
    converted = {}
    for key, text in given.items():
        if key not in known:
            raise SpecError(f"{where} has no parameter {key!r}; it takes {', '.join(sorted(known)) or 'none'}")
        name = known[key].name
        converted[name] = _convert(text, hints[name], f"{where}: {key}")
    return converted


def _convert(text: str, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    wanted = next(option for option in options if option is not type(None))
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise SpecError(f"{where} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return wanted(text)
    except ValueError:
        raise SpecError(f"{where} must be {_ARTICLE[wanted]}, got {text!r}") from None


_ARTICLE = {int: "a whole number", float: "a number", str: "a text"}
