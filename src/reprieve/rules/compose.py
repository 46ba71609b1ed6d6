"""Rules made of rules: both, either, and only inside a span of the text.

The first rule of a composition is its dial: its risk and threshold are kept, the others decide by their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.rules.base import Rule, VocabularySource, accepts
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
    def dial_value(self) -> Any:
        return self.parts[0].dial_value

    @property
    def base(self) -> str:
        """Exact match where a part needs the target's own draws."""
        return next((rule.base for rule in self.parts if rule.base != "token"), "token")

    @property
    def strictest(self) -> float:  # type: ignore[override]
        return self.parts[0].strictest

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(rule.needs for rule in self.parts))

    @property
    def target_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for rule in self.parts for layer in rule.target_layers}))

    @property
    def draft_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for rule in self.parts for layer in rule.draft_layers}))

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        return any(rule.reads_text for rule in self.parts)

    @property
    def beyond_truncation(self) -> bool:  # type: ignore[override]
        return all(rule.beyond_truncation for rule in self.parts)

    @property
    def reads_block(self) -> bool:  # type: ignore[override]
        return any(rule.reads_block for rule in self.parts)

    @property
    def rescues_in_turn(self) -> bool:  # type: ignore[override]
        return any(rule.rescues_in_turn for rule in self.parts)

    @property
    def heads(self) -> tuple[tuple[str, Any], ...]:
        return tuple(head for rule in self.parts for head in rule.heads)

    @property
    def threshold(self) -> float:
        return self.parts[0].threshold

    @property
    def leniency(self) -> float:
        return self.parts[0].leniency

    @property
    def max_rescues_per_block(self) -> int | None:
        return min((n for rule in self.parts if (n := rule.max_rescues_per_block) is not None), default=None)

    @property
    def risk_budget(self) -> float | None:
        return self.parts[0].risk_budget


def _is_limited(rule: Rule) -> bool:
    return rule.max_rescues_per_block is not None or rule.risk_budget is not None


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
        for place, rule in enumerate(self.rules):
            _require_rescuing(rule, self.name)
            if isinstance(rule, AnyOf) or (isinstance(rule, AllOf) and isinstance(self, AllOf)):
                raise SpecError(f"{self.name} cannot hold {rule.name}; write it out as a&b|a&c")
            if _is_limited(rule) and (place > 0 or isinstance(self, AnyOf)):
                raise SpecError(f"{rule.spec!r} has limits of its own: it can only be the first rule of an all_of")

    @property
    def parts(self) -> tuple[Rule, ...]:
        return self.rules

    def bind(self, tokenizer: VocabularySource) -> Rule:
        return dataclasses.replace(self, rules=tuple(rule.bind(tokenizer) for rule in self.rules))

    def with_heads(self, load: Callable[[str, str], Any]) -> Rule:
        return dataclasses.replace(self, rules=tuple(rule.with_heads(load) for rule in self.rules))

    def to(self, device: Any) -> Rule:
        return dataclasses.replace(self, rules=tuple(rule.to(device) for rule in self.rules))

    def with_parameter(self, name: str, value: float) -> Any:
        return dataclasses.replace(self, rules=(self.rules[0].with_parameter(name, value), *self.rules[1:]))

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
    """Rescue what at least one rule would rescue; only a dial of -inf switches the others off too."""

    name = "any_of"
    symbol = "|"

    def risk(self, evidence: Evidence) -> Tensor:
        """The first rule's risk; minus infinity where another rule accepts."""
        risk = self.rules[0].risk(evidence)
        for rule in self.rules[1:]:
            risk = torch.where(rule.risk(evidence) <= rule.threshold, -math.inf, risk)
        return risk

    def settled(self, evidence: Evidence) -> Tensor:
        """What the lossless check or a part that takes no advice lets pass."""
        passed = evidence.lossless_accepts
        for rule in self.rules:
            if "advice" not in rule.needs:
                passed = passed | accepts(rule, evidence)
        return passed


def all_of(*rules: Rule) -> AllOf:
    """Rescue what every rule would: `all_of(top_k, floor)`."""
    return AllOf(rules)


def any_of(*rules: Rule) -> AnyOf:
    """Rescue what at least one rule would."""
    return AnyOf(rules)


def last_occurrence(tokens: Sequence[int], marker: Sequence[int]) -> int:
    """Index just past the last occurrence of `marker` in `tokens`, or -1."""
    size = len(marker)
    for end in range(len(tokens), size - 1, -1):
        if list(tokens[end - size : end]) == list(marker):
            return end
    return -1


def quoted(text: str) -> str:
    """A marker as a specification writes it: in double quotes where it holds one of the grammar's own signs."""
    return f'"{text}"' if any(sign in text for sign in ",|&=:") else text


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
    reads_block = True

    rule: Rule
    start: str
    end: str
    start_ids: tuple[int, ...] | None = field(default=None, compare=False)
    end_ids: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _require_rescuing(self.rule, "a span")
        if '"' in self.start + self.end:
            raise SpecError(f"start and end must not hold a double quote, got {self.start!r}, {self.end!r}")
        if not self.start or not self.end:
            raise SpecError(f"a span needs both start and end, got start={self.start!r}, end={self.end!r}")

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.rule.needs | {"context_ids"}

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        return True

    def bind(self, tokenizer: VocabularySource) -> InsideSpan:
        """Encode the markers and bind the rule inside."""
        start_ids, end_ids = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.start, self.end)
        )
        return dataclasses.replace(self, rule=self.rule.bind(tokenizer), start_ids=start_ids, end_ids=end_ids)

    def with_heads(self, load: Callable[[str, str], Any]) -> Rule:
        return dataclasses.replace(self, rule=self.rule.with_heads(load))

    def to(self, device: Any) -> Rule:
        return dataclasses.replace(self, rule=self.rule.to(device))

    def with_parameter(self, name: str, value: float) -> Any:
        return dataclasses.replace(self, rule=self.rule.with_parameter(name, value))

    @property
    def params(self) -> dict[str, Any]:
        return {**self.rule.params, "start": self.start, "end": self.end}

    @property
    def spec(self) -> str:
        joint = "," if ":" in self.rule.spec else ":"
        return f"{self.rule.spec}{joint}start={quoted(self.start)},end={quoted(self.end)}"

    def risk(self, evidence: Evidence) -> Tensor:
        """The inner rule's risk; infinite outside the span."""
        assert self.start_ids is not None and self.end_ids is not None, "bind the rule to a tokenizer first"
        assert evidence.context_ids is not None and evidence.parents is not None
        context = evidence.context_ids.tolist()
        drafted = evidence.token_ids.tolist()
        longest = max(len(self.start_ids), len(self.end_ids))
        # After each place: the last few tokens, and whether the span is open there.
        states = {ROOT: (context[-longest:], inside_span(context, self.start_ids, self.end_ids))}
        inside = []
        for node, parent in enumerate(evidence.parents):
            tail, is_open = states[parent]
            inside.append(is_open and drafted[node] != self.end_ids[0])
            tail = [*tail, drafted[node]][-longest:]
            opened = last_occurrence(tail, self.start_ids) == len(tail)
            closed = last_occurrence(tail, self.end_ids) == len(tail)
            states[node] = (tail, opened or (is_open and not closed))
        mask = torch.tensor(inside, dtype=torch.bool, device=evidence.token_ids.device)
        return torch.where(mask, self.rule.risk(evidence), math.inf)
