"""Compositions of rules: all of them (`a&b`), or any of them (`a|b`).

The first rule provides the composition's dial, risk and threshold; the other rules decide by their own thresholds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.needs import Need
from reprieve.rules.base import Dial, Rule, Traits, VocabularySource, accepts, passes
from reprieve.rules.lossless import LosslessRule
from reprieve.types import Evidence


class Wrapper(Rule):
    """A rule made of parts; the first part provides its dial and threshold."""

    @property
    def traits(self) -> Traits:
        return Traits.merge([rule.traits for rule in self.parts])

    @property
    def dial(self) -> Dial | None:
        return self.parts[0].dial

    @property
    def dial_value(self) -> float | None:
        return self.parts[0].dial_value

    @property
    def threshold(self) -> float:
        return self.parts[0].threshold

    @property
    def looseness(self) -> float:
        return self.parts[0].looseness

    @property
    def heads(self) -> tuple[tuple[str, Any], ...]:
        return tuple(head for rule in self.parts for head in rule.heads)

    def with_parts(self, parts: Sequence[Rule]) -> Self:
        """Return a copy with other parts."""
        raise NotImplementedError

    def transform(self, change: Callable[[Rule], Rule]) -> Self:
        return self.with_parts([rule.transform(change) for rule in self.parts])

    def bind(self, tokenizer: VocabularySource) -> Self:
        return self.with_parts([rule.bind(tokenizer) for rule in self.parts])

    def to(self, device: Any) -> Self:
        return self.with_parts([rule.to(device) for rule in self.parts])

    def with_parameter(self, name: str, value: float) -> Self:
        return self.with_parts([self.parts[0].with_parameter(name, value), *self.parts[1:]])


def require_rescuing(rule: Rule, where: str) -> None:
    """Refuse a rule that replaces the lossless check or changes the target's distribution.

    Raises:
        SpecError: names the rule and the composition.
    """
    if rule.traits.replaces or rule.traits.relaxes_target or isinstance(rule, LosslessRule):
        raise SpecError(f"{where} takes rules that rescue rejected tokens, got {rule.spec!r}")


@dataclass(frozen=True)
class _Composite(Wrapper):
    rules: tuple[Rule, ...]

    symbol = ""

    def __post_init__(self) -> None:
        if len(self.rules) < 2:
            raise SpecError(f"{self.name} needs at least 2 rules, got {len(self.rules)}")
        for index, rule in enumerate(self.rules):
            require_rescuing(rule, self.name)
            if isinstance(rule, AnyOf) or (isinstance(rule, AllOf) and isinstance(self, AllOf)):
                raise SpecError(f"{self.name} cannot hold {rule.name}; write it out as a&b|a&c")
            if rule.traits.limited and (index > 0 or isinstance(self, AnyOf)):
                raise SpecError(f"{rule.spec!r} has limits of its own: it can only be the first rule of an all_of")

    @property
    def parts(self) -> tuple[Rule, ...]:
        return self.rules

    def with_parts(self, parts: Sequence[Rule]) -> Self:
        return dataclasses.replace(self, rules=tuple(parts))

    @property
    def params(self) -> dict[str, Any]:
        return {rule.name: rule.params for rule in self.rules}

    @property
    def spec(self) -> str:
        return self.symbol.join(rule.spec for rule in self.rules)

    @property
    def spec_without_dial(self) -> str:
        return self.symbol.join([self.rules[0].spec_without_dial, *(rule.spec for rule in self.rules[1:])])


@dataclass(frozen=True)
class AllOf(_Composite):
    """Rescue tokens that every rule would rescue; strict as soon as one of them is."""

    name = "all_of"
    symbol = "&"

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the first rule's risk, [...]; infinite where another rule refuses."""
        risk = self.rules[0].risk(evidence)
        for rule in self.rules[1:]:
            risk = torch.where(passes(rule.risk(evidence), rule.threshold), risk, math.inf)
        return risk


@dataclass(frozen=True)
class AnyOf(_Composite):
    """Rescue tokens that at least one rule would rescue. Only a threshold of -inf disables the other rules too."""

    name = "any_of"
    symbol = "|"

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the first rule's risk, [...]; minus infinity where another rule accepts."""
        risk = self.rules[0].risk(evidence)
        for rule in self.rules[1:]:
            risk = torch.where(passes(rule.risk(evidence), rule.threshold), -math.inf, risk)
        return risk

    def settled(self, evidence: Evidence) -> Tensor:
        """Mask of tokens accepted by the lossless check or by a part that needs no advice."""
        passed = evidence.lossless_accepts
        for rule in self.rules:
            if Need.ADVICE not in rule.traits.needs:
                passed = passed | accepts(rule, evidence)
        return passed


def all_of(*rules: Rule) -> AllOf:
    """Rescue tokens that every rule would rescue: `all_of(top_k, floor)`."""
    return AllOf(rules)


def any_of(*rules: Rule) -> AnyOf:
    """Rescue tokens that at least one rule would rescue."""
    return AnyOf(rules)
