"""Graders by name, which read and compare answers: shared by tasks, and open to other packages."""

from __future__ import annotations

import importlib.util
import inspect
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

from reprieve.errors import ReprieveError, SpecError
from reprieve.specs import Registry
from reprieve.tasks.answers import chosen_letter, final_answer
from reprieve.tasks.numbers import number_in, same_expression, same_number, written


class Grader(Protocol):
    """Extracts the answer from a response, and compares two answers."""

    name: ClassVar[str]

    def extract(self, text: str) -> str | None:
        """The final answer in a response, or None where it gives none."""
        ...

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        """Return whether two extracted answers are the same; an absent answer equals nothing."""
        ...


JUDGE = "judge"  # named in place of a grader: a language model compares responses
_DOTTED = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+(?![.,]?\d)")


GRADERS: Registry[Grader] = Registry("grader", "reprieve.tasks", group="reprieve.graders")
register_grader = GRADERS.register


@register_grader
@dataclass(frozen=True)
class ExactGrader(Grader):
    """The whole response is the answer; only identical texts are the same."""

    name: ClassVar[str] = "exact"

    def extract(self, text: str) -> str | None:
        return text.strip() or None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        return answer is not None and answer == other


@register_grader
@dataclass(frozen=True)
class NumberGrader(Grader):
    """The number that the final answer states, whatever its currency, unit or notation; see `answers` and `numbers`."""

    name: ClassVar[str] = "number"

    def extract(self, text: str) -> str | None:
        answer = final_answer(text)
        number = None if answer is None else number_in(answer)
        return None if number is None else written(number)

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        if answer is None or other is None:
            return False
        left, right = number_in(answer), number_in(other)
        return left is not None and right is not None and same_number(left, right)


@register_grader
@dataclass(frozen=True)
class MathGrader(Grader):
    """The final answer as a mathematical expression, or as words."""

    name: ClassVar[str] = "math"

    def extract(self, text: str) -> str | None:
        return final_answer(text)

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        return answer is not None and other is not None and same_expression(answer, other)


@register_grader
@dataclass(frozen=True)
class ChoiceGrader(ExactGrader):
    """A letter; see `answers.chosen_letter`."""

    name: ClassVar[str] = "choice"

    def extract(self, text: str) -> str | None:
        return chosen_letter(text)


@register_grader
@dataclass(frozen=True)
class DottedGrader(NumberGrader):
    """A number whose thousands are separated by dots."""

    name: ClassVar[str] = "dotted_number"

    def extract(self, text: str) -> str | None:
        return super().extract(_DOTTED.sub(lambda number: number[0].replace(".", ""), text))


@register_grader
@dataclass(frozen=True)
class AliasGrader(Grader):
    """A short answer, compared with any of several names, as TriviaQA's own evaluation does: case, articles and
    punctuation do not count."""

    name: ClassVar[str] = "alias"

    def extract(self, text: str) -> str | None:
        first = text.strip().split("\n", 1)[0]
        return first if _normal(first) else None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        if answer is None or other is None:
            return False
        return bool(_names(answer) & _names(other))


@dataclass(frozen=True)
class RegexGrader(ExactGrader):
    """The answer is the last match of a pattern: its first group, or all of it."""

    name = "regex"

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise SpecError(f"grader regex: {self.pattern!r} is not a pattern: {error}") from None
        if not self.pattern:
            raise SpecError("grader regex: needs a pattern, got an empty one")

    def extract(self, text: str) -> str | None:
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return None
        last = matches[-1]
        found = last[1] if last.re.groups else last[0]
        return (found or "").strip() or None


@dataclass(frozen=True)
class FunctionGrader(Grader):
    """A function of one's own, in a Python file."""

    name = "python"

    source: str  # FILE.py:FUNCTION

    def __post_init__(self) -> None:
        if (num := _num_required(self.source)) not in (1, 2):
            raise SpecError(f"grader {self.source} must take a response, or a response and an answer; it takes {num}")

    @property
    def compares(self) -> bool:
        """True where it compares a response with a reference; else it returns a response's answer."""
        return _num_required(self.source) == 2

    def extract(self, text: str) -> str | None:
        if self.compares:
            return text.strip() or None
        answer = self._call(text)
        return None if answer is None else str(answer)

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        if answer is None or other is None:
            return False
        return bool(self._call(answer, other)) if self.compares else answer == other

    def _call(self, *given: str) -> Any:
        try:
            return _function(self.source)(*given)
        except Exception as error:
            raise ReprieveError(f"grader {self.source} raised {type(error).__name__}: {error}") from error


def make_grader(spec: str) -> Grader:
    """A grader by name, or a `regex:` or `python:` one.

    Raises:
        SpecError: an unknown name, or a pattern or function that cannot be used.
    """
    kind, _, rest = spec.partition(":")
    if kind == "regex":
        return RegexGrader(rest)
    if kind == "python":
        return FunctionGrader(rest)
    if kind not in (known := (*GRADERS.names(), "regex:PATTERN", "python:FILE.py:FUNCTION", JUDGE)):
        raise SpecError(f"grader must be one of {', '.join(known)}, got {spec!r}")
    return GRADERS.make(spec)


def _names(answer: str) -> set[str]:
    """Return the normalised names in an answer, or in a reference with one name per line."""
    return {_normal(name) for name in answer.split("\n")} - {""}


def _normal(text: str) -> str:
    words = "".join(" " if sign in string.punctuation + "‘’´`_“”" else sign for sign in text.lower()).split()
    kept = " ".join(word for word in words if word not in ("a", "an", "the"))
    # Some signs can distinguish names and are kept: C++, -5, 5%.
    return kept if not re.search(r"[+#%$€£-]|\d\.\d", text) else " ".join(text.lower().split())


def _num_required(source: str) -> int:
    """Return the number of arguments that a function must be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(_function(source)).parameters.values()
    return sum(item.kind in kinds and item.default is inspect.Parameter.empty for item in given)


@lru_cache
def _function(source: str) -> Callable[..., Any]:
    path, _, name = source.rpartition(":")
    if not path or not name:
        raise SpecError(f"grader python: is written python:FILE.py:FUNCTION, got {source!r}")
    if not Path(path).is_file():
        raise SpecError(f"grader python: {path!r} is not a file")
    spec = importlib.util.spec_from_file_location(f"reprieve_grader_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SpecError(f"grader python: {path!r} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SpecError(f"grader python: {path!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]
