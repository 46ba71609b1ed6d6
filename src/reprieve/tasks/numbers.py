"""Written answers as values: numbers with currency, units, thousands and fractions, and expressions (math-verify)."""

from __future__ import annotations

import decimal
import logging
import re
from fractions import Fraction
from typing import Any, NamedTuple

from reprieve.errors import import_extra

_SYMBOLS = {
    "−": "-", "–": "-", "\u2044": "/",
    "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3",
}  # fmt: skip
WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|operatorname|mbox|textit)\s*\{([^{}]*)\}")  # words in LaTeX
_LATEX = (
    (WRAPPED, r" \1 "),
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}"), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r" \1/\2 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;: ]|\\quad|\\qquad|~|\\left|\\right"), " "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\(?:\$|pounds|euro)"), "$"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°"), " degrees "),
    (re.compile(r"[\u00a0\u202f\u2009]"), " "),
    (re.compile(r"\\approx|\\sim|≈"), " = "),
    (re.compile(r"\b(?:minus|negative)\s+(?=\d)", re.IGNORECASE), "-"),
)  # fmt: skip
# Groups of digits: 1 000 000, 1'000'000, 1_000_000; 12,34,567; 1.234.567.
_GROUPED = re.compile(r"(?<![\w.,])(\d{1,3})(?:([ '’_])\d{3})(?:\2\d{3})*(?!\d)(?!\s*/)")
_INDIAN = re.compile(r"(?<![\w.,])\d{1,2}(?:,\d{2})+,\d{3}(?!\d)")
_DOTTED = re.compile(r"(?<![\w.,])\d{1,3}(?:\.\d{3}){2,}(?!\d)")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_CURRENCY = "$€£¥₹"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_LONGEST_NUMBER = 400  # characters of a number with its unit, or of the sentence that states it
_MOST_DIGITS = 60
_CURRENCIES = {"dollar": "$", "usd": "$", "euro": "€", "eur": "€", "pound": "£", "gbp": "£"}
_MAGNITUDES = {
    "k": 1000, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9,
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_NUMBER = re.compile(
    rf"""(?=\S)(?P<sign>[-+]?)\s*[{_CURRENCY}]?\s*(?P<sign_behind>-?)\s*
    (?:(?P<whole>\d+)\s*(?:\s|-|and\s)\s*(?P<top>\d+)\s*/\s*(?P<bottom>\d+)   # 2 1/2
      |(?P<over>{_DIGITS})\s*/\s*(?P<under>{_DIGITS})                         # 3/4
      |10\s*\^\s*\{{?\s*(?P<power>[-+]?\d{{1,3}})\s*\}}?                     # 10^6
      |(?P<plain>{_DIGITS})
       (?:[eE](?P<exponent>[-+]?\d{{1,3}})(?![\w.])                           # 4.5e2, 4.5 x 10^2, 4.5 x 10²
         |\s*(?:[×xX*·]|\\times|\\cdot)\s*10\s*(?:\^\s*\{{?\s*(?P<tens>[-+]?\d{{1,3}})\s*\}}?|(?P<raised>⁻?[⁰¹²³⁴-⁹]{{1,3}})))?)
    (?P<times>\s*(?:hundred|thousand|million|billion|trillion|dozen)\b|(?-i:\s?k|K|M|B|\s?mn|\s?bn)\b(?!\s*/))?
    (?P<percent>\s*(?:%|percent\b|per\s+cent\b))?""",
    re.VERBOSE | re.IGNORECASE,
)
_CENTS = re.compile(r"^\s*(?:dollars?|euros?|pounds?)\s*,?\s*(?:and\s+)?(\d{1,2})\s*(?:cents?|pence)\b", re.IGNORECASE)
_VARIABLE = r"[a-zA-Z](?<![mgshLCFVWJN])(?=\s*(?:$|[-+*/^=)(]))"  # and not a unit
_GOES_ON = re.compile(
    rf"^\s*(?:\d|\(\s*or\b|out\s+of\b|outta\b|,\s*(?:maybe|perhaps|possibly)\s+\d|[:^]|[-*/+x×·]\s*[\d({_CURRENCY}]|\\(?:times|cdot|pm|div|sqrt|pi)|\*\*|(?:to|or|and)\s+[{_CURRENCY}]?\d"
    rf"|,\s*(?:and\s+|or\s+)?[{_CURRENCY}]?\d|[A-Za-z]+(?:\s*,\s*(?:and|or)?|\s+(?:and|or|to))\s*[{_CURRENCY}]?\d"
    rf"|[A-Za-z]+\s+\d|[.'_,]\d|\.?\\[a-z]|[eE][-+]?\d|!|[π√÷²³⅛⅜⅝⅞⁰¹⁴-⁹]|{_VARIABLE})"
)
_BEFORE = re.compile(r"[\w.)}\]/^:\\]$|\d\s*[-+*/×^]$|(?:sqrt|log|pi)\s*[({]?\s*$")
# Remarks beside an answer, and the parts of a sentence that can precede an answer.
_ASIDE = re.compile(
    r"\((?!\s*or\b)(?=[^()]*[A-Za-z=])[^()]*\)|\b(?:where|when|with|since|because|using)\b.*", re.IGNORECASE | re.DOTALL
)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_VERB = re.compile(r"\b(?:is|are|was|were|equals|be|lays?|makes?|costs?)\b", re.IGNORECASE)
_OTHER = re.compile(r"\b(?:not|never|in|per|every|from|after|of)\s*$|n['’]t\s*$|(?:\\pm|±)\s*$|-\s*\($", re.IGNORECASE)
# "x = 4, y = 5" names several values; "not 14 but 15" states the second.
_SEVERAL = re.compile(r"\d[^=]*(?:[,;]|\b(?:and|or)\b)\s*[A-Za-z]\w*\s*(?:_\s*\{?\w+\}?)?\s*=")
_BUT = re.compile(r"\bnot\b[^,;]*?\bbut\b", re.IGNORECASE)
_UNIT = re.compile(r"^\s*+(?:[A-Za-z%][A-Za-z'.-]*+\s*+(?:\^\s*+\{?[23]\}?|[²³])?\s*+/?\s*+){0,4}$")
# Expressions.
_LONGEST_EXPRESSION = 200  # characters
_HUGE_EXPONENT = re.compile(r"(\^|\*\*)\s*[({]?\s*-?\d{3,}|[)}]\s*(\^|\*\*)\s*[({]?\s*\d{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]+(?:\s+[A-Za-z'-]+)*")
# A sum with its result, or dollars and cents.
_SUM = re.compile(
    r"(?:\\(?:frac|times|cdot|div)|[\d\s+*/×÷().,$%{}-])*=[\d\s+*/×÷().,$%-]+|-?\d+ dollars? and \d+ cents?"
)
# Parts of an answer that math-verify ignores, although answers can differ in them.
_NOT_READ = re.compile(r"_\s*\{?\d|\b(?:or|and)\b|\\pm|±|\d:\d|=.*,.*=|\d\s*[A-Za-z]{2,}")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\w+\s*\^)")
_PRECISION = 40  # at which values are compared once more
_CLOSE = 1e-9  # relative
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴-⁹⁻]+")
# Notation of programs and plain text, and its LaTeX.
_REWRITTEN = (
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])"), r"\1 \\cdot 10^{\2}"),
    (re.compile(r"\*\*\s*(\w+|\([^()]*\))"), r"^{\1}"),
    (re.compile(r"\*"), r" \\cdot "),
    (re.compile(r"(?<![\\A-Za-z])(?:pi(?![A-Za-z])|π)|(?<=[A-Za-z])π"), r"\\pi "),
    (re.compile(r"(?:(?<!\\)\bsqrt|√)\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\w+)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<!\\)\bexp\s*\(([^()]*)\)"), r"e^{\1}"),
    (re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|ln|log)(?=\s*[({\d]|\s+\w)"), r"\\\1"),
)
_CHOICE = re.compile(r"\(\s*([A-Za-z])\s*\)")


class Number(NamedTuple):
    """A number as written: value, percent sign, unit and variable."""

    value: Fraction
    percent: bool = False
    unit: str = ""  # its currency or the words behind it; empty where there are none
    name: str = ""  # variable with this value: the x of x = 3


def number_in(text: str) -> Number | None:
    """Return the only number in a short answer; None if there is none, or several.

    In an equation, the part after the last `=` counts; words around the number are ignored. A range, a
    time of day, or two quantities ("5 hours and 30 minutes") are not one number, but dollars and cents are.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    plain = _ASIDE.sub(" ", _plain(_BULLET.sub("", text)))
    if _SEVERAL.search(plain):
        return None
    plain = _BUT.split(plain)[-1]
    for side in reversed(plain.split("=")):
        if not any(character.isdigit() for character in side):
            continue
        said = _VERB.split(side)[-1]
        if found := _first_number(said if any(character.isdigit() for character in said) else side):
            return found
    return None


def _first_number(text: str) -> Number | None:
    match = _NUMBER.search(text)
    if match is None or _BEFORE.search(text[: match.start()]) or _OTHER.search(text[: match.start()]):
        return None
    rest, value = text[match.end() :], _value(match)
    if value is not None and (cents := _CENTS.match(rest)):
        return Number(value + Fraction(int(cents[1]), -100 if _negative(match) else 100))
    return None if value is None or _GOES_ON.match(rest) else Number(value, bool(match["percent"]))


def whole_number(text: str) -> Number | None:
    """Return the number of a text with nothing but a number, its variable and its unit; None for other texts."""
    if len(text) > _LONGEST_NUMBER:
        return None
    plain = _plain(text).strip()
    before, equals, right = plain.rpartition("=")
    name = before.strip()
    if equals:
        if not re.fullmatch(r"[A-Za-z](?:_\w+)?", name):
            return None
        plain = right.strip()
    match = _NUMBER.match(plain)
    rest = "" if match is None else plain[match.end() :]
    if match is None or not _UNIT.match(rest) or _GOES_ON.match(rest) or re.search(r"\b(?:or|and)\b", rest):
        return None
    value = _value(match)
    currency = next((sign for sign in _CURRENCY if sign in match[0]), "")
    unit = " ".join(word.rstrip("s") for word in rest.lower().split()) or currency
    return None if value is None else Number(value, bool(match["percent"]), unit, name)


def same_number(left: Number, right: Number) -> bool:
    """Return whether two numbers are equal: `50%` equals both 50 and 0.5; 5 equals 5 km, but 5 m does not."""
    if left.name and right.name and left.name != right.name:
        return False
    units = {_CURRENCIES.get(number.unit, number.unit) for number in (left, right)}
    if len(units) > 1 and "" not in units:
        return False
    if left.value == right.value:
        return left.percent == right.percent or not (left.unit or right.unit)
    one, other = (number.value / 100 if number.percent else number.value for number in (left, right))
    return left.percent != right.percent and one == other


def written(number: Number) -> str:
    """Return a number as text: 72, 1.5, 2/3 or 50%."""
    top, bottom = number.value.as_integer_ratio()
    with decimal.localcontext() as exact:
        exact.prec = 3000  # digits; exponents have three
        exact.traps[decimal.Inexact] = True
        try:
            text = f"{decimal.Decimal(top) / bottom:f}"
        except decimal.Inexact:
            text = f"{top}/{bottom}"
    return f"{text}%" if number.percent else text


def _plain(text: str) -> str:
    for symbol, replacement in _SYMBOLS.items():
        text = text.replace(symbol, replacement)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return _ungrouped(text)


def _ungrouped(text: str) -> str:
    """Return a text whose numbers are written without separators between groups of digits."""
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _INDIAN.sub(lambda match: match[0].replace(",", ""), text)
    return _DOTTED.sub(lambda match: match[0].replace(".", ""), text)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MOST_DIGITS:
        return None

    def part(name: str) -> Fraction:
        return Fraction(re.sub("[, ]", "", match[name]))

    if match["whole"]:
        top, bottom = part("top"), part("bottom")
        value = None if not bottom else part("whole") + top / bottom
    elif match["over"]:
        bottom = part("under")
        value = None if not bottom else part("over") / bottom
    elif match["power"]:
        value = Fraction(10) ** int(match["power"])
    else:
        raised = match["exponent"] or match["tens"] or (match["raised"] or "0").translate(_SUPERSCRIPTS)
        value = part("plain") * Fraction(10) ** int(raised)
    if value is None:
        return None
    if match["times"]:
        value *= _MAGNITUDES[match["times"].strip().lower()]
    return -value if _negative(match) else value


def _negative(match: re.Match[str]) -> bool:
    return "-" in (match["sign"], match["sign_behind"])


def same_expression(answer: str, other: str) -> bool:
    """Return whether answers are equivalent: `1.5` and `3/2`, `\\frac{1}{2}` and `0.5`, `\\$1,000` and `1000 dollars`.

    Words are compared as text, ignoring case. Answers that could take forever to evaluate are equal only if they are
    written identically.

    Raises:
        ReprieveError: math-verify is needed and missing.
    """
    left, right = (_rewritten(_bare(text)) for text in (answer, other))
    if left == right:
        return bool(left)
    one, two = whole_number(left), whole_number(right)
    if one and two:
        return same_number(one, two)
    if (one or two) and any(_SUM.fullmatch(text) for text in (left, right)):
        one, two = one or number_in(left), two or number_in(right)
        return one is not None and two is not None and same_number(one, two)
    if any(_NOT_READ.search(text) for text in (left, right)):  # math-verify would ignore the difference
        return left.replace(" ", "") == right.replace(" ", "")
    words = [WRAPPED.sub(r"\1", text).strip() for text in (left, right)]
    if any(_WORDS.fullmatch(text) for text in words):  # math-verify would read letters as factors, in any order
        return words[0].casefold() == words[1].casefold()
    if _too_hard(left) or _too_hard(right):
        return False
    math_verify = import_extra("math_verify", "tasks")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of the missing time limit at every call
    left_value, right_value = _parse(math_verify, left), _parse(math_verify, right)
    return bool(math_verify.verify(left_value, right_value, timeout_seconds=None)) and not _apart(
        left_value, right_value
    )


def _rewritten(text: str) -> str:
    """Return an answer in the notation that math-verify reads: `2*pi` as `2 \\cdot \\pi`, `x²` as `x^{2}`."""
    text = _SUPERSCRIPT_RUN.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", _ungrouped(text))
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text.strip()


def _apart(left: list[Any], right: list[Any]) -> bool:
    """Return whether both are values that differ by more than rounding (math-verify rounds: 2^-99 equals 2^-98)."""
    values = []
    for side in (left, right):
        value: Any = side[0] if side else None
        if not hasattr(value, "free_symbols") or value.free_symbols or not getattr(value, "is_number", False):
            return False
        values.append(value.evalf(_PRECISION))
    one, other = values
    try:
        return bool(abs(one - other) > _CLOSE * max(abs(one), abs(other)))
    except TypeError:  # no order: infinities, undefined values
        return False


def _bare(text: str) -> str:
    """Strip outer delimiters and commands that only affect typesetting."""
    bare = text.strip().removeprefix("$").removesuffix("$").strip().rstrip(".").strip()
    if choice := _CHOICE.fullmatch(bare):
        return choice[1]
    return bare.replace("\\left", "").replace("\\right", "").replace("\\!", "").replace("{,}", ",")


def _too_hard(text: str) -> bool:
    """Return whether evaluation could run forever (factorials, towers, huge exponents), or the text is no answer."""
    if len(text) > _LONGEST_EXPRESSION or max(map(text.count, "({[")) > 20:
        return True
    return "!" in text or text.count("^") > 8 or bool(_TOWER.search(text) or _HUGE_EXPONENT.search(text))


def _parse(math_verify: Any, text: str) -> Any:
    wrapped = text if "$" in text or "\\boxed" in text else f"${text}$"
    # No time limit: it works by signals, which only the main thread may use.
    return math_verify.parse(wrapped, parsing_timeout=None)
