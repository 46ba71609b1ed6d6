"""Compositions and restrictions of rules, and the parser of their specifications.

Grammar: `name:parameter=value,...`; `a&b` rescues tokens that both rescue, `a|b` tokens that either one rescues (`&`
binds tighter). With `start=` and `end=`, a rescuing rule applies only between these two markers in the text;
`span=thinking` and `span=tool_calls` use the markers of the model's tokenizer. With `outside=true`, the rule applies
everywhere else. With `strict_first=16`, the first 16 tokens of an answer are decoded losslessly.

The first rule of a composition provides its dial, risk and threshold; the others decide by their own thresholds.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_choice, require_whole
from reprieve.rules.base import RULES, RescueLimits, Rule, Traits, accepts, within_threshold
from reprieve.rules.lossless import LosslessRule
from reprieve.rules.spans import MODEL_SPANS, model_markers, span_is_open
from reprieve.specs import construct, format_spec, parameters_of, parse_spec, split
from reprieve.types import Evidence, Need, Tokenizer


class Wrapper(Rule):
    """A rule made of parts; the first part provides its dial and threshold."""

    def with_parts(self, parts: Sequence[Rule]) -> Self:
        """Return a copy with other parts."""
        raise NotImplementedError

    def transform(self, change: Callable[[Rule], Rule]) -> Self:
        return self.with_parts([rule.transform(change) for rule in self.parts])

    def bind(self, tokenizer: Tokenizer) -> Self:
        return self.with_parts([rule.bind(tokenizer) for rule in self.parts])

    def to(self, device: Any) -> Self:
        return self.with_parts([rule.to(device) for rule in self.parts])

    def with_dial(self, value: float) -> Self:
        return self.with_parts([self.parts[0].with_dial(value), *self.parts[1:]])


def require_rescuing(rule: Rule, where: str) -> None:
    """Refuse a rule that replaces the lossless check or changes the target's distribution.

    Raises:
        SpecError: names the rule and the composition.
    """
    if rule.traits.replaces or rule.relaxes_target or isinstance(rule, LosslessRule):
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
            if rule.limits not in (None, RescueLimits()) and (index > 0 or isinstance(self, AnyOf)):
                raise SpecError(f"{rule.spec!r} has limits of its own: it can only be the first rule of an all_of")

    @property
    def traits(self) -> Traits:
        """All parts' inputs."""
        parts = [rule.traits for rule in self.rules]
        return dataclasses.replace(
            parts[0],
            needs=frozenset().union(*(part.needs for part in parts)),
            target_layers=tuple(sorted({layer for part in parts for layer in part.target_layers})),
            draft_layers=tuple(sorted({layer for part in parts for layer in part.draft_layers})),
            check=next((part.check for part in parts if part.check != "token"), "token"),
            reads_text=any(part.reads_text for part in parts),
            beyond_truncation=all(part.beyond_truncation for part in parts),
        )

    @property
    def parts(self) -> tuple[Rule, ...]:
        return self.rules

    def with_parts(self, parts: Sequence[Rule]) -> Self:
        return dataclasses.replace(self, rules=tuple(parts))

    @property
    def params(self) -> dict[str, Any]:
        return {rule.name: rule.params for rule in self.rules}

    def written(self, *, dial: bool = True) -> str:
        return self.symbol.join([self.rules[0].written(dial=dial), *(rule.spec for rule in self.rules[1:])])


@dataclass(frozen=True)
class AllOf(_Composite):
    """Rescue tokens that every rule would rescue; strict as soon as one of them is."""

    name = "all_of"
    symbol = "&"

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the first rule's risk, [...]; infinite where another rule refuses."""
        risk = self.rules[0].risk(evidence)
        for rule in self.rules[1:]:
            risk = torch.where(within_threshold(rule.risk(evidence), rule.threshold), risk, math.inf)
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
            risk = torch.where(within_threshold(rule.risk(evidence), rule.threshold), -math.inf, risk)
        return risk

    def passes_without_advice(self, evidence: Evidence) -> Tensor:
        """Mask of tokens accepted by the lossless check or by a part that needs no advice."""
        passed = evidence.lossless_accepts
        for rule in self.rules:
            if Need.ADVICE not in rule.traits.needs:
                passed = passed | accepts(rule, evidence)
        return passed


@dataclass(frozen=True)
class _Restricted(Wrapper):
    """A rule that applies to part of the text; its specification is the inner rule's with extra parameters."""

    rule: Rule = field(metadata={"spec": False})

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    def with_parts(self, parts: Sequence[Rule]) -> Self:
        return dataclasses.replace(self, rule=parts[0])

    @property
    def params(self) -> dict[str, Any]:
        return {**self.rule.params, **super().params}

    def written(self, *, dial: bool = True) -> str:
        return format_spec(self.rule.written(dial=dial), self)


@dataclass(frozen=True)
class InsideSpan(_Restricted):
    """A rescuing rule that applies only between two markers, such as thinking tokens; strict elsewhere. Or the reverse.

    Whether it applies to a token depends on the text before the token, including drafted tokens. The first token of the
    marker that ends the relaxed part is never rescued, so that relaxation cannot move its end.
    """

    name = "inside_span"

    start: str = ""
    end: str = ""
    span: str | None = None  # thinking or tool_calls, whose markers `bind` finds in the tokenizer
    outside: bool = False  # the reverse: strict between the markers
    start_ids: tuple[int, ...] | None = field(default=None, compare=False, metadata={"spec": False})
    end_ids: tuple[int, ...] | None = field(default=None, compare=False, metadata={"spec": False})

    def __post_init__(self) -> None:
        require_rescuing(self.rule, "a span")
        if self.span is None:
            if not self.start or not self.end:
                raise SpecError(f"a span needs both start and end, got start={self.start!r}, end={self.end!r}")
            return
        if self.start or self.end:
            raise SpecError("give span, or start and end, not both")
        require_choice("span", self.span, tuple(MODEL_SPANS))

    @property
    def traits(self) -> Traits:
        """Traits of the inner rule, which also needs the text before the block."""
        inside = self.rule.traits
        needs = inside.needs | {Need.CONTEXT}
        return dataclasses.replace(inside, needs=needs, reads_text=True)

    def bind(self, tokenizer: Tokenizer) -> Self:
        """Encode the markers and bind the inner rule.

        Raises:
            SpecError: `span` is set and the tokenizer has no markers for it.
        """
        markers = (self.start, self.end) if self.span is None else model_markers(self.span, tokenizer)
        start_ids, end_ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in markers)
        return dataclasses.replace(super().bind(tokenizer), start_ids=start_ids, end_ids=end_ids)

    def risk(self, evidence: Evidence) -> Tensor:
        """The inner rule's risk; infinite where the rule does not apply."""
        assert self.start_ids is not None and self.end_ids is not None, "bind the rule to a tokenizer first"
        leaves_by = self.start_ids[0] if self.outside else self.end_ids[0]
        holds = span_is_open(evidence, self.start_ids, self.end_ids) ^ self.outside
        return torch.where(holds & (evidence.token_ids != leaves_by), self.rule.risk(evidence), math.inf)


@dataclass(frozen=True)
class StrictFirst(_Restricted):
    """A rescuing rule that applies after the first tokens of an answer, which are decoded losslessly.

    The first tokens of an answer decide its form, and whether the model refuses to answer. Tokens of the prompt and of
    earlier turns of a conversation do not count.
    """

    name = "strict_first"

    strict_first: int

    def __post_init__(self) -> None:
        require_rescuing(self.rule, "strict_first")
        require_whole("strict_first", self.strict_first, 1)
        if isinstance(self.rule, StrictFirst):
            raise SpecError("strict_first is given twice")

    @property
    def traits(self) -> Traits:
        """Traits of the inner rule, which also needs the positions in the answer."""
        inside = self.rule.traits
        return dataclasses.replace(inside, needs=inside.needs | {Need.ANSWER_POSITIONS})

    def risk(self, evidence: Evidence) -> Tensor:
        """The inner rule's risk; infinite among the answer's first tokens."""
        assert evidence.answer_positions is not None, "the answer's length is needed: Need.ANSWER_POSITIONS"
        return torch.where(evidence.answer_positions >= self.strict_first, self.rule.risk(evidence), math.inf)


_OF_AN_ARM = re.compile(r'@(K|drafter)=(?=[^"]*$)')
_FLAGS = {"K": "--num-draft-tokens", "drafter": "--drafter"}


def parse_rule(spec: str) -> Rule:
    """Return the rule described by a specification.

    Raises:
        SpecError: unknown rule or parameter, or a value that cannot be read or is out of range; the message lists
            what is known.
    """
    if not spec.strip():
        raise SpecError(f"rule must be one of {', '.join(RULES.names())}, got an empty text")
    if spec.count('"') % 2:
        raise SpecError(f"rule {spec!r}: a double quote is not closed")
    try:
        either = [_parse_all(part) for part in split(spec, "|")]
    except SpecError as error:
        if arm := _OF_AN_ARM.search(spec):
            raise SpecError(f"{error}; {arm[0]} belongs to an arm of bench; elsewhere, use {_FLAGS[arm[1]]}") from None
        raise
    return either[0] if len(either) == 1 else AnyOf(tuple(either))


def _parse_all(spec: str) -> Rule:
    both = [_parse_one(part.strip()) for part in split(spec, "&")]
    return both[0] if len(both) == 1 else AllOf(tuple(both))


def _parse_one(spec: str) -> Rule:
    name, given = parse_spec(spec, what="rule")
    where = f"rule {name}"
    kinds = (InsideSpan, StrictFirst)
    restrictions = [{key: given.pop(key) for key in parameters_of(kind) if key in given} for kind in kinds]
    rule: Rule = construct(RULES.get(name), given, where=where)
    for kind, its in zip(kinds, restrictions, strict=True):
        if its:
            rule = construct(kind, its, where=where, rule=rule)
    return rule
