"""What every rule is: a risk per drafted token, and a threshold that one dial sets."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_range
from reprieve.types import Evidence


class VocabularySource(Protocol):
    """The part of a tokenizer that rules about tokens' text need."""

    def __len__(self) -> int: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Rule(ABC):
    """A rule scores drafted tokens; lower risk is safer.

    A *rescuing* rule accepts a token when the lossless check accepts it or when `risk <= threshold`. A *replacing*
    rule (`replaces = True`) ignores the lossless check and accepts exactly when `risk <= threshold`.

    Subclasses are frozen dataclasses whose fields are the paper's own parameters. `dial` names the field that sweeps
    vary, `strictest` the value of that field at which the rule changes nothing.

    A rule may limit itself: at most `max_rescues_per_block` rescues a round, and at most `risk_budget` of summed risk
    an answer. `InsideSpan` holds any rescuing rule to a span of the text.
    """

    name: ClassVar[str]
    dial: ClassVar[str]
    strictest: ClassVar[float]
    replaces: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()  # optional `Evidence` fields it reads
    reads_text: ClassVar[bool] = False  # whether `bind` needs a tokenizer that knows the tokens' text
    beyond_truncation: ClassVar[bool] = False  # whether it may accept tokens that top-k or top-p cut off
    reads_block: ClassVar[bool] = False  # whether a token's risk depends on the rest of its block or on the text
    rescues_in_turn: ClassVar[bool] = False  # whether each sibling of a tree is rescued before the next one is tried
    truncates: ClassVar[bool] = False  # whether it accepts the likeliest tokens, by the target's distribution alone

    @property
    @abstractmethod
    def threshold(self) -> float:
        """Largest accepted risk, in the unit of `risk`."""

    @property
    def leniency(self) -> float:
        """Grows with what the rule lets pass: compares two settings of one rule, in the unit of `threshold`."""
        return self.threshold

    @abstractmethod
    def risk(self, evidence: Evidence) -> Tensor:
        """Risk of each drafted token, [...]; +inf is never accepted."""

    def settled(self, evidence: Evidence) -> Tensor:
        """Which drafted tokens pass whatever an advisor would say of them, [...], bool."""
        return evidence.lossless_accepts

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the rule reads; -1 is the last, after the final norm."""
        return (-1,) if {"node_hidden", "parent_hidden"} & self.needs else ()

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """The same for the draft."""
        return (-1,) if "draft_hidden" in self.needs else ()

    @property
    def base(self) -> str:
        """The lossless check under the rule: `token`, `block` or `exact` (see `LosslessRule`)."""
        return "token"

    def relaxed_target_probs(self, evidence: Evidence) -> Tensor | None:
        """A distribution that sampling verifies against instead of the target's, [..., V]; None for the target's."""
        return None

    @property
    def max_rescues_per_block(self) -> int | None:
        """Most rescues in one round; None for no limit."""
        return None

    @property
    def risk_budget(self) -> float | None:
        """Largest summed risk of rescued tokens in one answer; None for no limit."""
        return None

    def bind(self, tokenizer: VocabularySource) -> Rule:
        """The same rule, ready for a tokenizer; rules that do not read tokens' text return themselves."""
        return self

    def with_dial(self, value: float) -> Self:
        """A copy whose dial is set to `value`.

        Raises:
            SpecError: the value is outside the dial's range.
        """
        return self.with_parameter(self.dial, value)

    def with_parameter(self, name: str, value: float) -> Self:
        """A copy with one numeric parameter replaced, in the paper's own unit.

        Raises:
            SpecError: no numeric parameter of that name, or a value out of range.
        """
        fields = parameters_of(self)
        types = {key: str(f.type) for key, f in fields.items()}
        numeric = [key for key, kind in types.items() if "int" in kind or "float" in kind]
        if name not in numeric:
            raise SpecError(f"rule {self.name}: the dial must be one of {', '.join(numeric) or 'none'}, got {name!r}")
        whole = "int" in types[name] and float(value).is_integer()
        return dataclasses.replace(self, **{fields[name].name: int(value) if whole else value})

    @property
    def dial_value(self) -> Any:
        """What the dial is set to, in the paper's own unit; None where the rule has no such parameter."""
        fields = parameters_of(self)
        return getattr(self, fields[self.dial].name) if self.dial in fields else None

    def with_heads(self, load: Callable[[str, str], Any]) -> Rule:
        """The same rule with the trained heads it names, from `load(kind, path)`; most rules have none."""
        return self

    def to(self, device: Any) -> Rule:
        """The same rule with its heads' weights on a device."""
        return self

    @property
    def heads(self) -> tuple[tuple[str, Any], ...]:
        """Names and objects of the heads it holds."""
        return ()

    @property
    def params(self) -> dict[str, Any]:
        """The paper's parameters, by name, as JSON can hold them."""
        return {name: _json_number(getattr(self, f.name)) for name, f in parameters_of(self).items()}

    @property
    def spec(self) -> str:
        """The shortest text, dial always included, that `parse_rule` turns back into this rule."""
        given = [
            f"{name}={_format(getattr(self, f.name))}"
            for name, f in parameters_of(self).items()
            if name == self.dial or getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(given) if given else "")


def parameters_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """A rule's parameters by the names that specifications use: `lambda` for the field `lambda_`."""
    return {f.name.rstrip("_"): f for f in dataclasses.fields(kind) if f.init and f.metadata.get("spec", True)}


def bounded_risk(rule: Rule, evidence: Evidence) -> Tensor:
    """The rule's risk, [...], made infinite for tokens the target cannot produce at all."""
    allowed = evidence.possible if rule.beyond_truncation else evidence.allowed
    return torch.where(allowed, rule.risk(evidence), math.inf)


def accepts(rule: Rule, evidence: Evidence, *, threshold: float | Tensor | None = None) -> Tensor:
    """Which drafted tokens the rule lets pass, before any per-block or per-answer limit: [...], bool.

    `threshold` overrides the rule's own, and may be a tensor that broadcasts against the risk, so that requests in
    one batch can each have theirs. NaN and +inf never pass; a threshold of -inf lets nothing pass.
    """
    limit = torch.as_tensor(rule.threshold if threshold is None else threshold, device=evidence.token_ids.device)
    risk = bounded_risk(rule, evidence)
    passed = (risk <= limit) & (risk < math.inf) & (limit > -math.inf)
    return passed if rule.replaces else passed | evidence.lossless_accepts


def require_k(name: str, value: int | None) -> None:
    """Refuse a rank cap below 1; None means no cap."""
    if value is not None and (not float(value).is_integer() or value < 1):
        raise SpecError(f"{name} must be a whole number of 1 or more, got {value!r}")


def require_probability(name: str, value: float) -> None:
    require_range(name, value, 0.0, 1.0)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
