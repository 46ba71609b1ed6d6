"""What every rule is: a risk per drafted token, a threshold that one dial sets, and traits for the engine."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_range
from reprieve.needs import Need
from reprieve.registry import Registry
from reprieve.specs import format_spec, parameters_of
from reprieve.types import Evidence


class VocabularySource(Protocol):
    """The part of a tokenizer that rules about tokens' text need."""

    def __len__(self) -> int: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Dial:
    """The one parameter of a rule that sweeps, requests and certificates vary, in the paper's unit and direction.

    Args:
        name: of the parameter.
        strictest: the value at which the rule changes nothing.
        stops: values worth a slider's stop, from strict to lenient.
    """

    name: str
    strictest: float
    stops: tuple[float, ...] = ()


@dataclass(frozen=True)
class About:
    """What the documentation and the study need to know of a rule; its docstring says the rest.

    Args:
        origin: paper and place, or the software that ships it.
        study: settings that `benchmarks/study.py` measures; the first chooses the rule's K. () leaves the rule out.
    """

    origin: str = ""
    study: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traits:
    """What the engine must know of a rule before it asks for risks.

    Args:
        needs: what it reads beside the tokens and the target's logits.
        target_layers: of the target's hidden states; -1 is the last, after the final norm, and the default where it
            needs any.
        draft_layers: the same for the draft.
        check: the lossless check under it: `token`, `block` or `exact` (see `LosslessRule`).
        replaces: it ignores the lossless check and accepts exactly where risk <= threshold.
        relaxes_target: when sampling, tokens are verified against `relaxed_target_probs` instead of the target's.
        reads_text: `bind` needs a tokenizer that knows the tokens' text.
        reads_block: a token's risk depends on the rest of its block, or on the text before it.
        beyond_truncation: it may accept tokens that top-k or top-p cut off.
        rescues_in_turn: each sibling of a tree is rescued before the next one is tried.
        truncates: it accepts the likeliest tokens, by the target's distribution alone.
        max_rescues_per_block: most rescues in one round; None for no limit.
        risk_budget: largest summed risk of rescued tokens in one answer; None for no limit.
    """

    needs: frozenset[Need] = frozenset()
    target_layers: tuple[int, ...] = ()
    draft_layers: tuple[int, ...] = ()
    check: str = "token"
    replaces: bool = False
    relaxes_target: bool = False
    reads_text: bool = False
    reads_block: bool = False
    beyond_truncation: bool = False
    rescues_in_turn: bool = False
    truncates: bool = False
    max_rescues_per_block: int | None = None
    risk_budget: float | None = None

    def __post_init__(self) -> None:
        if not self.target_layers and {Need.NODE_HIDDEN, Need.PARENT_HIDDEN} & self.needs:
            object.__setattr__(self, "target_layers", (-1,))
        if not self.draft_layers and Need.DRAFT_HIDDEN in self.needs:
            object.__setattr__(self, "draft_layers", (-1,))

    @property
    def limited(self) -> bool:
        """Whether it counts what it rescues."""
        return self.max_rescues_per_block is not None or self.risk_budget is not None

    @classmethod
    def merge(cls, parts: Sequence[Traits]) -> Traits:
        """The traits of a rule made of rescuing rules; only the first of them can have a budget."""
        return cls(
            needs=frozenset().union(*(part.needs for part in parts)),
            target_layers=tuple(sorted({layer for part in parts for layer in part.target_layers})),
            draft_layers=tuple(sorted({layer for part in parts for layer in part.draft_layers})),
            check=next((part.check for part in parts if part.check != "token"), "token"),
            relaxes_target=any(part.relaxes_target for part in parts),
            reads_text=any(part.reads_text for part in parts),
            reads_block=any(part.reads_block for part in parts),
            beyond_truncation=all(part.beyond_truncation for part in parts),
            rescues_in_turn=any(part.rescues_in_turn for part in parts),
            max_rescues_per_block=min(
                (part.max_rescues_per_block for part in parts if part.max_rescues_per_block is not None), default=None
            ),
            risk_budget=parts[0].risk_budget,
        )


@dataclass(frozen=True)
class Rule(ABC):
    """A rule scores drafted tokens; lower risk is safer.

    A *rescuing* rule accepts a token when the lossless check accepts it or when `risk <= threshold`. A *replacing*
    rule ignores the lossless check and accepts exactly when `risk <= threshold`.

    Subclasses are frozen dataclasses whose fields are the paper's own parameters. They name their `own_dial` and
    `own_traits`; where these depend on the fields, `traits` is overridden.
    """

    name: ClassVar[str]
    own_dial: ClassVar[Dial | None] = None
    own_traits: ClassVar[Traits] = Traits()
    about: ClassVar[About] = About()

    @property
    def traits(self) -> Traits:
        """What the engine must know of it."""
        return self.own_traits

    @property
    def dial(self) -> Dial | None:
        """What sweeps vary; None for a rule that has no dial."""
        return self.own_dial

    @property
    @abstractmethod
    def threshold(self) -> float:
        """Largest accepted risk, in the unit of `risk`."""

    @property
    def looseness(self) -> float:
        """Grows with what the rule lets pass: compares two settings of one rule, in the unit of `threshold`."""
        return self.threshold

    @abstractmethod
    def risk(self, evidence: Evidence) -> Tensor:
        """Risk of each drafted token, [...]; +inf is never accepted."""

    def settled(self, evidence: Evidence) -> Tensor:
        """Which drafted tokens pass whatever an advisor would say of them, [...], bool."""
        return evidence.lossless_accepts

    def relaxed_target_probs(self, evidence: Evidence) -> Tensor | None:
        """A distribution that sampling verifies against instead of the target's, [..., V]; None for the target's."""
        return None

    @property
    def parts(self) -> tuple[Rule, ...]:
        """The rules it is made of; none for most. The first one's dial is its own."""
        return ()

    @property
    def leaves(self) -> tuple[Rule, ...]:
        """The simple rules in it; itself for most."""
        return tuple(leaf for part in self.parts for leaf in part.leaves) or (self,)

    def transform(self, change: Callable[[Rule], Rule]) -> Rule:
        """The same rule with a change made to every simple rule in it."""
        return change(self)

    def bind(self, tokenizer: VocabularySource) -> Rule:
        """The same rule, ready for a tokenizer; rules that do not read tokens' text return themselves."""
        return self

    def to(self, device: Any) -> Rule:
        """The same rule with its heads' weights on a device."""
        return self

    @property
    def heads(self) -> tuple[tuple[str, Any], ...]:
        """Names and objects of the heads it holds."""
        return ()

    def with_dial(self, value: float) -> Self:
        """A copy whose dial is set to `value`.

        Raises:
            SpecError: a rule without a dial, or a value outside the dial's range.
        """
        if self.dial is None:
            raise SpecError(f"rule {self.name} has no dial to set to {value!r}")
        return self.with_parameter(self.dial.name, value)

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
    def dial_value(self) -> float | None:
        """What the dial is set to, in the paper's own unit; None without a dial, or where it sets no limit."""
        if self.dial is None:
            return None
        value: float | None = getattr(self, parameters_of(self)[self.dial.name].name)
        return value

    def sequence_bound(self, num_drafted: float) -> float | None:
        """How far an answer's distribution can lie from the target's, where it holds so many drafted tokens and drafts
        are sampled; None where no such bound is proved."""
        return None

    @property
    def params(self) -> dict[str, Any]:
        """The paper's parameters, by name, as JSON can hold them."""
        return {name: _json_number(getattr(self, f.name)) for name, f in parameters_of(self).items()}

    @property
    def spec(self) -> str:
        """The shortest text, dial always included, that `parse_rule` turns back into this rule."""
        return format_spec(self.name, self, always=(self.dial.name,) if self.dial else ())

    @property
    def spec_without_dial(self) -> str:
        """The specification without its dial: what rules of one sweep have in common."""
        return format_spec(self.name, self, without=(self.dial.name,) if self.dial else ())


RULES: Registry[Rule] = Registry("rule", "reprieve.rules")
register_rule = RULES.register


def bounded_risk(rule: Rule, evidence: Evidence) -> Tensor:
    """The rule's risk, [...], made infinite for tokens the target cannot produce at all."""
    allowed = evidence.possible if rule.traits.beyond_truncation else evidence.allowed
    return torch.where(allowed, rule.risk(evidence), math.inf)


def accepts(rule: Rule, evidence: Evidence, *, threshold: float | Tensor | None = None) -> Tensor:
    """Which drafted tokens the rule lets pass, before any per-block or per-answer limit: [...], bool.

    `threshold` overrides the rule's own, and may be a tensor that broadcasts against the risk, so that requests in
    one batch can each have theirs. NaN and +inf never pass; a threshold of -inf lets nothing pass.
    """
    passed = passes(bounded_risk(rule, evidence), rule.threshold if threshold is None else threshold)
    return passed if rule.traits.replaces else passed | evidence.lossless_accepts


def passes(risk: Tensor, threshold: float | Tensor) -> Tensor:
    """Which risks are within the threshold, [...], bool: an infinite risk never is, and -inf lets nothing pass."""
    limit = torch.as_tensor(threshold, device=risk.device)
    return (risk <= limit) & (risk < math.inf) & (limit > -math.inf)


def require_k(name: str, value: int | None) -> None:
    """Refuse a rank cap below 1; None means no cap."""
    if value is not None and (not float(value).is_integer() or value < 1):
        raise SpecError(f"{name} must be a whole number of 1 or more, got {value!r}")


def require_probability(name: str, value: float) -> None:
    """Refuse a value outside [0, 1]."""
    require_range(name, value, 0.0, 1.0)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
