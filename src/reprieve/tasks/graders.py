"""How answers are read and compared, by name: shared by tasks, and open to other packages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Protocol

from reprieve.registry import Registry
from reprieve.tasks.expressions import same_expression

_PHRASE = re.compile(r"final answer is:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(\s|$)|\n")
_NUMBER = re.compile(r"final answer is\s+(-?\d[\d,]*)")


class Grader(Protocol):
    """Reads the answer out of a response, and tells whether two answers are the same."""

    name: ClassVar[str]

    def extract(self, text: str) -> str | None:
        """The final answer in a response, or None where it gives none."""
        ...

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        """Whether two extracted answers are the same; an absent answer equals nothing."""
        ...


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
    """The whole number after the last "final answer is"."""

    name: ClassVar[str] = "number"

    def extract(self, text: str) -> str | None:
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        return answer is not None and other is not None and int(answer) == int(other)


@register_grader
@dataclass(frozen=True)
class MathGrader(Grader):
    """What follows the last "final answer is", compared as mathematical expressions."""

    name: ClassVar[str] = "math"

    def extract(self, text: str) -> str | None:
        after = _PHRASE.split(text)[1:]
        return _SENTENCE_END.split(after[-1].strip())[0].strip(" *") or None if after else None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        return answer is not None and other is not None and same_expression(answer, other)
