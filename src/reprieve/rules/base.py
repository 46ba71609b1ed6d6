"""Rule interface: a risk per drafted token, a threshold set by one dial, and traits for the engine."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.specs import Registry, format_spec, parameters_of
from reprieve.types import Evidence, Need, Tokenizer


@dataclass(frozen=True)
class Dial:
    """The one parameter of a rule that sweeps, requests and certificates vary, in the paper's unit and direction.

    Args:
        name: parameter name.
        strictest: the value at which the rule changes nothing.
        stops: values for a slider, from strict to lenient.
    """

    name: str
    strictest: float
    stops: tuple[float, ...] = ()


@dataclass(frozen=True)
class Traits:
    """Inputs of a rule and how it relates to the lossless check, read by the engine before it computes risks.

    Args:
        needs: inputs besides the tokens and the target's logits.
        target_layers: layers of the target's hidden states; -1 is the last, after the final norm, and the default if
            the rule needs hidden states.
        draft_layers: the same for the draft.
        check: the lossless check it is built on: `token`, `block` or `exact` (see `LosslessRule`).
        replaces: it ignores the lossless check and accepts exactly where risk <= threshold.
        reads_text: `bind` needs a tokenizer that knows the tokens' text.
        beyond_truncation: it may accept tokens that top-k or top-p cut off.
    """

    needs: frozenset[Need] = frozenset()
    target_layers: tuple[int, ...] = ()
    draft_layers: tuple[int, ...] = ()
    check: str = "token"
    replaces: bool = False
    reads_text: bool = False
    beyond_truncation: bool = False

    def __post_init__(self) -> None:
        if not self.target_layers and {Need.NODE_HIDDEN, Need.PARENT_HIDDEN} & self.needs:
            object.__setattr__(self, "target_layers", (-1,))
        if not self.draft_layers and Need.DRAFT_HIDDEN in self.needs:
            object.__setattr__(self, "draft_layers", (-1,))


@dataclass(frozen=True)
class RescueLimits:
    """Limits on a rule's rescues; None for no limit.

    Args:
        per_block: most rescues in one round.
        budget: largest summed risk of the rescued tokens in one answer.
    """

    per_block: int | None = None
    budget: float | None = None


@dataclass(frozen=True)
class Rule(ABC):
    """A rule scores drafted tokens; lower risk is safer.

    A *rescuing* rule accepts a token when the lossless check accepts it or when `risk <= threshold`. A *replacing*
    rule ignores the lossless check and accepts exactly when `risk <= threshold`.

    Subclasses are frozen dataclasses whose fields are the paper's parameters. They define `own_dial` and `own_traits`,
    and override `traits` if these depend on the fields.
    """

    name: ClassVar[str]
    own_dial: ClassVar[Dial | None] = None
    own_traits: ClassVar[Traits] = Traits()
    truncates: ClassVar[bool] = False  # accepts the likeliest tokens, by the target's distribution alone
    origin: ClassVar[str] = ""  # paper and section, or the software that ships it

    @property
    def traits(self) -> Traits:
        """Inputs of this rule."""
        return self.own_traits

    @property
    def limits(self) -> RescueLimits | None:
        """Limits on the rescues; None for a rule that decides each token by its risk alone."""
        return self.parts[0].limits if self.parts else None

    @property
    def rescues_in_turn(self) -> bool:
        """True if each sibling of a tree is rescued before the next one is tried."""
        return any(part.rescues_in_turn for part in self.parts)

    @property
    def relaxes_target(self) -> bool:
        """True if sampled tokens are verified against `relaxed_target_probs` instead of the target's."""
        return False

    @property
    def dial(self) -> Dial | None:
        """Parameter that sweeps vary; None for a rule without one."""
        return self.parts[0].dial if self.parts else self.own_dial

    @property
    def threshold(self) -> float:
        """Largest accepted risk, in the unit of `risk`: by default the dial's value."""
        if self.parts:
            return self.parts[0].threshold
        assert self.dial is not None, "a rule without a dial has its own threshold"
        value: float = getattr(self, self.dial.name)
        return value

    @property
    def leniency(self) -> float:
        """Leniency in the unit of `threshold`; larger is more lenient. Comparable between settings of one rule."""
        return self.parts[0].leniency if self.parts else self.threshold

    @abstractmethod
    def risk(self, evidence: Evidence) -> Tensor:
        """Risk of each drafted token, [...]; +inf is never accepted."""

    def passes_without_advice(self, evidence: Evidence) -> Tensor:
        """Mask of drafted tokens that pass regardless of an advisor, [...], bool."""
        return evidence.lossless_accepts

    def relaxed_target_probs(self, evidence: Evidence, *, threshold: float | Tensor | None = None) -> Tensor | None:
        """Distribution that replaces the target's when sampling is verified, [..., V]; None for the target's.

        Args:
            threshold: overrides the rule's own; a tensor has one value for each token.
        """
        return None

    @property
    def parts(self) -> tuple[Rule, ...]:
        """Rules that this rule is composed of, the first of which gives it dial, threshold and limits; () if simple."""
        return ()

    @property
    def leaves(self) -> tuple[Rule, ...]:
        """Simple rules in the composition; the rule itself if it is simple."""
        return tuple(leaf for part in self.parts for leaf in part.leaves) or (self,)

    def transform(self, change: Callable[[Rule], Rule]) -> Rule:
        """Return the rule with `change` applied to every simple rule in it."""
        return change(self)

    def bind(self, tokenizer: Tokenizer) -> Rule:
        """Return the rule bound to a tokenizer; rules that do not read tokens' text return themselves."""
        return self

    def to(self, device: Any) -> Rule:
        """Return the rule with its heads' weights on a device."""
        return self

    @property
    def heads(self) -> tuple[tuple[str, Any], ...]:
        """Names and objects of the heads in this rule."""
        return tuple(head for part in self.parts for head in part.heads)

    def with_dial(self, value: float) -> Self:
        """Return a copy with the dial set to `value`, in the paper's unit.

        Raises:
            SpecError: a rule without a dial, or a value outside the dial's range.
        """
        if self.dial is None:
            raise SpecError(f"rule {self.name} has no dial to set to {value!r}")
        field = parameters_of(self)[self.dial.name]
        whole = "int" in str(field.type) and float(value).is_integer()
        return dataclasses.replace(self, **{field.name: int(value) if whole else value})

    @property
    def dial_value(self) -> float | None:
        """Value of the dial in the paper's unit; None without a dial or without a limit."""
        if self.parts or self.dial is None:
            return self.parts[0].dial_value if self.parts else None
        value: float | None = getattr(self, parameters_of(self)[self.dial.name].name)
        return value

    def sequence_bound(self, num_drafted: float) -> float | None:
        """Return the bound on the divergence of an answer from the target, or None if no bound is proved.

        Args:
            num_drafted: drafted tokens in the answer; the drafts are assumed to be sampled.
        """
        return None

    @property
    def params(self) -> dict[str, Any]:
        """Parameters by name, with values that JSON can hold."""
        return {name: _json_number(getattr(self, f.name)) for name, f in parameters_of(self).items()}

    @property
    def spec(self) -> str:
        """Shortest specification, dial included, from which `parse_rule` makes this rule."""
        return self.written()

    @property
    def spec_without_dial(self) -> str:
        """Specification without the dial, which all rules of one sweep share."""
        return self.written(dial=False)

    def written(self, *, dial: bool = True) -> str:
        """Return the specification, always with the dial or always without it."""
        name = self.dial.name if self.dial else None
        return format_spec(self.name, self, always=name) if dial else format_spec(self.name, self, without=name)


RULES: Registry[Rule] = Registry("rule", "reprieve.rules")
register_rule = RULES.register


def bounded_risk(rule: Rule, evidence: Evidence) -> Tensor:
    """Return the rule's risk, [...], set to infinity for tokens that the target cannot produce."""
    allowed = evidence.possible if rule.traits.beyond_truncation else evidence.allowed
    return torch.where(allowed, rule.risk(evidence), math.inf)


def accepts(rule: Rule, evidence: Evidence) -> Tensor:
    """Return the mask of drafted tokens that the rule accepts, [...], bool, before any limit per block or answer."""
    passed = within_threshold(bounded_risk(rule, evidence), rule.threshold)
    return passed if rule.traits.replaces else passed | evidence.lossless_accepts


def within_threshold(risk: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the mask of risks within the threshold, [...], bool.

    NaN and infinite risks never pass, and a threshold of -inf accepts nothing. A tensor of thresholds must broadcast
    against the risk.
    """
    limit = torch.as_tensor(threshold, device=risk.device)
    return (risk <= limit) & (risk < math.inf) & (limit > -math.inf)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
