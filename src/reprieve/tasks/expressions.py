"""When two written answers are the same number or expression, by math-verify."""

from __future__ import annotations

import logging
import re
from typing import Any

from reprieve.errors import import_extra

_LONGEST = 200  # characters
_HUGE_EXPONENT = re.compile(r"(\^|\*\*)\s*[({]?\s*-?\d{3,}")
_PLAIN = re.compile(r"-?\d+(\.\d+)?")
_DRESSING = re.compile(r"^\$(?=[-\d])|(?<=\d),(?=\d{3})")  # a currency sign in front, commas between thousands


def same_expression(answer: str, other: str) -> bool:
    """Whether two answers are equivalent: `1.5` and `3/2`, `\\frac{1}{2}` and `0.5`, `$1,000` and `1000`.

    Answers that could take for ever to evaluate are equal only where they are written alike.

    Raises:
        ReprieveError: math-verify is needed and missing.
    """
    left, right = (_DRESSING.sub("", text.strip()).strip() for text in (answer, other))
    if left == right:
        return bool(left)
    if _PLAIN.fullmatch(left) and _PLAIN.fullmatch(right):
        return float(left) == float(right)
    if _too_hard(left) or _too_hard(right):
        return False
    math_verify = import_extra("math_verify", "tasks")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of the missing time limit at every call
    return bool(math_verify.verify(_parse(math_verify, left), _parse(math_verify, right), timeout_seconds=None))


def _too_hard(text: str) -> bool:
    """Whether evaluating an answer could take for ever: factorials, towers, huge exponents; or it is no answer."""
    return len(text) > _LONGEST or "!" in text or text.count("^") > 1 or bool(_HUGE_EXPONENT.search(text))


def _parse(math_verify: Any, text: str) -> Any:
    wrapped = text if "$" in text or "\\boxed" in text else f"${text}$"
    # No time limit: it works by signals, which only the main thread may use.
    return math_verify.parse(wrapped, parsing_timeout=None)
