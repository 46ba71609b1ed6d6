"""Rules that apply to part of the text only: between two markers, or from a position in the answer onwards.

Markers are given as two texts, by the name of a model family, or by `thinking` or `tool_calls`, whose markers are read
from the model's tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_choice, require_whole
from reprieve.needs import Need
from reprieve.rules.base import Rule, Traits, VocabularySource
from reprieve.rules.compose import AllOf, AnyOf, Wrapper, require_rescuing
from reprieve.rules.markers import span_is_open
from reprieve.specs import quoted
from reprieve.types import Evidence

# Thinking by model family: the markers of the chat templates.
SPANS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek-r1": ("<think>", "</think>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
}
THINKING, TOOL_CALLS = "thinking", "tool_calls"
# Markers by span, in the order in which a tokenizer is searched for them. gpt-oss comes first: its start is not one
# token, so `_SIGNS` names the tokens that give its format away.
MODEL_SPANS = {
    THINKING: (
        SPANS["gpt-oss"],
        ("<think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("◁think▷", "◁/think▷"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    TOOL_CALLS: (
        ("<tool_call>", "</tool_call>"),
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
}
_SIGNS = {SPANS["gpt-oss"]: ("<|channel|>", "<|message|>", "<|end|>")}


def model_markers(span: str, tokenizer: VocabularySource) -> tuple[str, str]:
    """Return the markers of `thinking` or `tool_calls` that a tokenizer has as tokens.

    Markers that a tokenizer would cut into pieces do not count: the pieces depend on the text around them, and an end
    marker that is not recognised would leave the span open.

    Raises:
        SpecError: the tokenizer has none of them.
    """
    for markers in MODEL_SPANS[span]:
        if all(is_token(text, tokenizer) for text in _SIGNS.get(markers, markers)):
            return markers
    known = ", ".join(f"{start} {end}" for start, end in MODEL_SPANS[span])
    raise SpecError(
        f"span {span}: the tokenizer has no tokens for it (looked for {known}); name the markers with start= and end=, "
        "or serve the rule without a span"
    )


def is_token(text: str, tokenizer: VocabularySource) -> bool:
    """Return whether a text is one token, and not the token for unknown text."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return len(token_ids) == 1 and tokenizer.decode(list(token_ids)).strip() == text


@dataclass(frozen=True)
class _Restricted(Wrapper):
    """A rule that applies to part of the text; its specification is the inner rule's with extra parameters."""

    rule: Rule

    @property
    def _parameters(self) -> str:
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Rule, ...]:
        return (self.rule,)

    def with_parts(self, parts: Sequence[Rule]) -> Self:
        return dataclasses.replace(self, rule=parts[0])

    @property
    def spec(self) -> str:
        return self._restricted(self.rule.spec)

    @property
    def spec_without_dial(self) -> str:
        return self._restricted(self.rule.spec_without_dial)

    def _restricted(self, spec: str) -> str:
        return spec + ("," if ":" in spec else ":") + self._parameters


@dataclass(frozen=True)
class InsideSpan(_Restricted):
    """A rescuing rule that applies only between two markers, such as thinking tokens; strict elsewhere. Or the reverse.

    Whether it applies to a token depends on the text before the token, including drafted tokens. The first token of the
    marker that ends the relaxed part is never rescued, so that relaxation cannot move its end.
    """

    name = "inside_span"

    start: str = ""
    end: str = ""
    outside: bool = False  # the reverse: strict between the markers
    span: str | None = None  # thinking or tool_calls: the markers are the model's own, found by `bind`
    start_ids: tuple[int, ...] | None = field(default=None, compare=False)
    end_ids: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        require_rescuing(self.rule, "a span")
        if self.span is not None:
            require_choice("span", self.span, tuple(MODEL_SPANS))
            if self.start or self.end:
                raise SpecError("give span, or start and end, not both")
        elif not self.start or not self.end:
            raise SpecError(f"a span needs both start and end, got start={self.start!r}, end={self.end!r}")

    @property
    def traits(self) -> Traits:
        """Traits of the inner rule, which also needs the text before the block."""
        inside = self.rule.traits
        needs = inside.needs | {Need.CONTEXT}
        return dataclasses.replace(inside, needs=needs, reads_text=True, truncates=False)

    def bind(self, tokenizer: VocabularySource) -> Self:
        """Encode the markers and bind the inner rule.

        Raises:
            SpecError: `span` is set and the tokenizer has no markers for it.
        """
        markers = (self.start, self.end) if self.span is None else model_markers(self.span, tokenizer)
        start_ids, end_ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in markers)
        return dataclasses.replace(super().bind(tokenizer), start_ids=start_ids, end_ids=end_ids)

    @property
    def params(self) -> dict[str, Any]:
        where = {"start": self.start, "end": self.end} if self.span is None else {"span": self.span}
        return {**self.rule.params, **where, "outside": self.outside}

    @property
    def _parameters(self) -> str:
        where = f"start={quoted(self.start)},end={quoted(self.end)}" if self.span is None else f"span={self.span}"
        return where + (",outside=true" if self.outside else "")

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

    num_tokens: int

    def __post_init__(self) -> None:
        require_whole("strict_first", self.num_tokens, 1)
        require_rescuing(self.rule, "strict_first")
        if isinstance(self.rule, StrictFirst):
            raise SpecError("strict_first is given twice")

    @property
    def traits(self) -> Traits:
        """Traits of the inner rule, which also needs the positions in the answer."""
        inside = self.rule.traits
        return dataclasses.replace(inside, needs=inside.needs | {Need.ANSWER_POSITIONS}, truncates=False)

    @property
    def params(self) -> dict[str, Any]:
        return {**self.rule.params, "strict_first": self.num_tokens}

    @property
    def _parameters(self) -> str:
        return f"strict_first={self.num_tokens}"

    def risk(self, evidence: Evidence) -> Tensor:
        """The inner rule's risk; infinite among the answer's first tokens."""
        assert evidence.answer_positions is not None, "the answer's length is needed: Need.ANSWER_POSITIONS"
        return torch.where(evidence.answer_positions >= self.num_tokens, self.rule.risk(evidence), math.inf)


def restricted(rule: Rule, restrict: Callable[[Rule], Rule]) -> Rule:
    """Return the rule with each part of its compositions restricted, so that its specification can express it."""
    if isinstance(rule, AllOf | AnyOf):
        return rule.with_parts([restricted(part, restrict) for part in rule.parts])
    return restrict(rule)
