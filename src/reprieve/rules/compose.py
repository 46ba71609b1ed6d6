"""Rules made of rules: both, either, and only inside a span of the text.

The first rule of a composition is its dial: its risk and threshold are kept, the others decide by their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.rules.base import Rule, VocabularySource
from reprieve.rules.cascades import CascadeRule
from reprieve.rules.lossless import LosslessRule
from reprieve.types import ROOT, Evidence


class _Wrapper(Rule):
    """A rule made of `parts`; what describes a rule by class attribute elsewhere is answered by the parts here."""

    @property
    def parts(self) -> tuple[Rule, ...]:
        raise NotImplementedError

    @property
    def dial(self) -> str:  # type: ignore[override]
        return self.parts[0].dial

    @property
    def strictest(self) -> float:  # type: ignore[override]
        return self.parts[0].strictest

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(rule.needs for rule in self.parts))

    @property
    def threshold(self) -> float:
        return self.parts[0].threshold

    @property
    def max_rescues_per_block(self) -> int | None:
        return min((n for rule in self.parts if (n := rule.max_rescues_per_block) is not None), default=None)

    @property
    def risk_budget(self) -> float | None:
        return self.parts[0].risk_budget


def _require_rescuing(rule: Rule, where: str) -> None:
    replaces_check = rule.replaces or (isinstance(rule, CascadeRule) and rule.kind == "tok")
    if replaces_check or isinstance(rule, LosslessRule):
        raise SpecError(f"{where} takes rules that rescue rejected tokens, got {rule.spec!r}")


@dataclass(frozen=True)
class _Composite(_Wrapper):
    rules: tuple[Rule, ...]

    symbol = ""

    def __post_init__(self) -> None:
        if len(self.rules) < 2:
            raise SpecError(f"{self.name} needs at least 2 rules, got {len(self.rules)}")
        for rule in self.rules:
            _require_rescuing(rule, self.name)

    @property
    def parts(self) -> tuple[Rule, ...]:
        return self.rules

    def bind(self, tokenizer: VocabularySource) -> Rule:
        return dataclasses.replace(self, rules=tuple(rule.bind(tokenizer) for rule in self.rules))

    def with_dial(self, value: float) -> Any:
        return dataclasses.replace(self, rules=(self.rules[0].with_dial(value), *self.rules[1:]))

    @property
    def params(self) -> dict[str, Any]:
        return {rule.name: rule.params for rule in self.rules}

    @property
    def spec(self) -> str:
        return self.symbol.join(rule.spec for rule in self.rules)


@dataclass(frozen=True)
class AllOf(_Composite):
    """Rescue what every rule would rescue; strict as soon as one of them is."""

    name = "all_of"
    symbol = "&"

    def risk(self, evidence: Evidence) -> Tensor:
        """The first rule's risk; infinite where another rule refuses."""
        risk = self.rules[0].risk(evidence)
        for rule in self.rules[1:]:
            risk = torch.where(rule.risk(evidence) <= rule.threshold, risk, math.inf)
        return risk


@dataclass(frozen=True)
class AnyOf(_Composite):
    """Rescue what at least one rule would rescue; its dial alone cannot make it strict."""

    name = "any_of"
    symbol = "|"

    def risk(self, evidence: Evidence) -> Tensor:
        """The first rule's risk; minus infinity where another rule accepts."""
        risk = self.rules[0].risk(evidence)
        for rule in self.rules[1:]:
            risk = torch.where(rule.risk(evidence) <= rule.threshold, -math.inf, risk)
        return risk


def last_occurrence(tokens: Sequence[int], marker: Sequence[int]) -> int:
    """Index just past the last occurrence of `marker` in `tokens`, or -1."""
    size = len(marker)
    for end in range(len(tokens), size - 1, -1):
        if list(tokens[end - size : end]) == list(marker):
            return end
    return -1


def inside_span(tokens: Sequence[int], start_ids: Sequence[int], end_ids: Sequence[int]) -> bool:
    """Whether a text is inside a span: `start` was seen, and `end` not since."""
    return last_occurrence(tokens, start_ids) > last_occurrence(tokens, end_ids)


@dataclass(frozen=True)
class InsideSpan(_Wrapper):
    """A rescuing rule that holds only between two markers (thinking tokens, say); strict outside.

    A token is judged by the text before it, the drafted tokens it follows included; the first token of the end
    marker is itself never rescued, so that relaxing cannot close the span.
    """

    name = "inside_span"

    rule: Rule
    start: str
    end: str
    start_ids: tuple[int, ...] | None = field(default=None, compare=False)
    end_ids: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _require_rescuing(self.rule, "a span")
        if not self.start or not self.end:
            raise SpecError(f"a span needs both start and end, got start={self.start!r}, end={self.end!r}")

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.rule.needs | {"context_ids"}

    def bind(self, tokenizer: VocabularySource) -> InsideSpan:
        """Encode the markers and bind the rule inside."""
        start_ids, end_ids = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.start, self.end)
        )
        return dataclasses.replace(self, rule=self.rule.bind(tokenizer), start_ids=start_ids, end_ids=end_ids)

    def with_dial(self, value: float) -> Any:
        return dataclasses.replace(self, rule=self.rule.with_dial(value))

    @property
    def params(self) -> dict[str, Any]:
        return {**self.rule.params, "start": self.start, "end": self.end}

    @property
    def spec(self) -> str:
        return f"{self.rule.spec}{',' if ':' in self.rule.spec else ':'}start={self.start},end={self.end}"

    def risk(self, evidence: Evidence) -> Tensor:
        """The inner rule's risk; infinite outside the span."""
        assert self.start_ids is not None and self.end_ids is not None, "bind the rule to a tokenizer first"
        assert evidence.context_ids is not None and evidence.parents is not None
        context = evidence.context_ids.tolist()
        drafted = evidence.token_ids.tolist()
        paths: dict[int, list[int]] = {ROOT: context}
        inside = []
        for node, parent in enumerate(evidence.parents):
            before = paths[parent]
            open_here = inside_span(before, self.start_ids, self.end_ids)
            inside.append(open_here and drafted[node] != self.end_ids[0])
            paths[node] = [*before, drafted[node]]
        mask = torch.tensor(inside, device=evidence.token_ids.device)
        return torch.where(mask, self.rule.risk(evidence), math.inf)
