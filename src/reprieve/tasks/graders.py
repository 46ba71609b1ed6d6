"""Graders by name, which read and compare answers: shared by tasks, and open to other packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from reprieve.specs import Registry
from reprieve.tasks.answers import final_answer
from reprieve.tasks.expressions import same_expression
from reprieve.tasks.numbers import number_in, same_number, written


class Grader(Protocol):
    """Extracts the answer from a response, and compares two answers."""

    name: ClassVar[str]

    def extract(self, text: str) -> str | None:
        """The final answer in a response, or None where it gives none."""
        ...

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        """Return whether two extracted answers are the same; an absent answer equals nothing."""
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
