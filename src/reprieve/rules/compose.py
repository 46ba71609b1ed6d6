"""Rules made of rules: both, either, and only inside a span of the text.

The first rule of a composition is its dial: its risk and threshold are kept, the others decide by their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.needs import Need
from reprieve.rules.base import Dial, Rule, Traits, VocabularySource, accepts, passes
from reprieve.rules.lossless import LosslessRule
from reprieve.specs import quoted
from reprieve.types import ROOT, Evidence


class _Wrapper(Rule):
    """A rule made of parts, the first of which gives it dial and threshold."""

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


def _require_rescuing(rule: Rule, where: str) -> None:
    if rule.traits.replaces or rule.traits.relaxes_target or isinstance(rule, LosslessRule):
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
            if rule.traits.limited and (place > 0 or isinstance(self, AnyOf)):
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
    """Rescue tokens that at least one rule would rescue. Only a dial of -inf switches the other rules off too."""

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


# Where models think, by family: the markers of their chat templates.
SPANS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek-r1": ("<think>", "</think>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
}


@dataclass(frozen=True)
class InsideSpan(_Wrapper):
    """A rescuing rule that holds only between two markers (thinking tokens, say); strict outside. Or the reverse.

    A token is judged by the text before it, the drafted tokens it follows included; the first token of the marker that
    would end its hold is itself never rescued, so that relaxing cannot move the span.
    """

    name = "inside_span"

    rule: Rule
    start: str
    end: str
    outside: bool = False  # the reverse: strict between the markers
    start_ids: tuple[int, ...] | None = field(default=None, compare=False)
    end_ids: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _require_rescuing(self.rule, "a span")
        if not self.start or not self.end:
            raise SpecError(f"a span needs both start and end, got start={self.start!r}, end={self.end!r}")

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    def with_parts(self, parts: Sequence[Rule]) -> Self:
        return dataclasses.replace(self, rule=parts[0])

    @property
    def traits(self) -> Traits:
        """Those of the rule inside, which now reads the text."""
        inside = self.rule.traits
        needs = inside.needs | {Need.CONTEXT}
        return dataclasses.replace(inside, needs=needs, reads_text=True, reads_block=True, truncates=False)

    def bind(self, tokenizer: VocabularySource) -> Self:
        """Encode the markers and bind the rule inside."""
        start_ids, end_ids = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.start, self.end)
        )
        return dataclasses.replace(super().bind(tokenizer), start_ids=start_ids, end_ids=end_ids)

    @property
    def params(self) -> dict[str, Any]:
        return {**self.rule.params, "start": self.start, "end": self.end, "outside": self.outside}

    @property
    def spec(self) -> str:
        return self._marked(self.rule.spec)

    @property
    def spec_without_dial(self) -> str:
        return self._marked(self.rule.spec_without_dial)

    def _marked(self, rule: str) -> str:
        joint = "," if ":" in rule else ":"
        reverse = ",outside=true" if self.outside else ""
        return f"{rule}{joint}start={quoted(self.start)},end={quoted(self.end)}{reverse}"

    def risk(self, evidence: Evidence) -> Tensor:
        """The inner rule's risk; infinite where the rule does not hold."""
        assert self.start_ids is not None and self.end_ids is not None, "bind the rule to a tokenizer first"
        assert evidence.context_ids is not None, "a span needs the text before the block: Need.CONTEXT"
        parents = range(-1, len(evidence.token_ids) - 1) if evidence.parents is None else evidence.parents
        context = evidence.context_ids.tolist()
        drafted = evidence.token_ids.tolist()
        longest = max(len(self.start_ids), len(self.end_ids))
        # After each place: the last few tokens, and whether the span is open there.
        states = {ROOT: (context[-longest:], inside_span(context, self.start_ids, self.end_ids))}
        inside = []
        for node, parent in enumerate(parents):
            tail, is_open = states[parent]
            leaves_by = self.start_ids[0] if self.outside else self.end_ids[0]
            inside.append(is_open is not self.outside and drafted[node] != leaves_by)
            tail = [*tail, drafted[node]][-longest:]
            opened = last_occurrence(tail, self.start_ids) == len(tail)
            closed = last_occurrence(tail, self.end_ids) == len(tail)
            states[node] = (tail, opened or (is_open and not closed))
        mask = torch.tensor(inside, dtype=torch.bool, device=evidence.token_ids.device)
        return torch.where(mask, self.rule.risk(evidence), math.inf)
