"""Equality of written answers as numbers or expressions, by math-verify."""

from __future__ import annotations

import logging
import re
from typing import Any

from reprieve.errors import import_extra
from reprieve.tasks.numbers import SUPERSCRIPTS, WRAPPED, number_in, same_number, ungrouped, whole_number

_LONGEST = 200  # characters
_HUGE_EXPONENT = re.compile(r"(\^|\*\*)\s*[({]?\s*-?\d{3,}|[)}]\s*(\^|\*\*)\s*[({]?\s*\d{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]+(?:\s+[A-Za-z'-]+)*")
# A sum with its result, or dollars and cents.
_SUM = re.compile(
    r"(?:\\(?:frac|times|cdot|div)|[\d\s+*/×÷().,$%{}-])*=[\d\s+*/×÷().,$%-]+|-?\d+ dollars? and \d+ cents?"
)
# Parts of an answer that math-verify ignores, although answers can differ in them.
_NOT_READ = re.compile(r"_\s*\{?\d|\b(?:or|and)\b|\\pm|±|\d:\d|=.*,.*=|\d\s*[A-Za-z]{2,}")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\w+\s*\^)")
_DIGITS = 40  # at which values are compared once more
_CLOSE = 1e-9  # relative
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁻]+")
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
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(SUPERSCRIPTS) + "}", ungrouped(text))
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
        values.append(value.evalf(_DIGITS))
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
    if len(text) > _LONGEST or max(map(text.count, "({[")) > 20:
        return True
    return "!" in text or text.count("^") > 8 or bool(_TOWER.search(text) or _HUGE_EXPONENT.search(text))


def _parse(math_verify: Any, text: str) -> Any:
    wrapped = text if "$" in text or "\\boxed" in text else f"${text}$"
    # No time limit: it works by signals, which only the main thread may use.
    return math_verify.parse(wrapped, parsing_timeout=None)
