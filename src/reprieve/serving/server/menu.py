"""The rules a server offers, and how one request chooses among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.errors import SpecError
from reprieve.rules import LosslessRule, Rule
from reprieve.serving.leniency import STRICT, SWITCH, Policy, RequestError, dial_value

# Positions of a slider, from strict to lenient, in the unit of each rule's own dial.
_STOPS: dict[str, tuple[float, ...]] = {
    "judge": (0.0, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8),
    "pivot": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "lts": (1.0, 0.99, 0.97, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.0),
    "arbiter": (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0),
    "margin": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0),
    "top_k": (1, 2, 3, 4, 6, 8, 16, 32, 64),
    "math_symbols": (1, 2, 4, 8, 16, 32, 64, 128),
    "typical": (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0),
    "ratio": (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
    "floor": (1.0, 0.5, 0.3, 0.1, 0.05, 0.01, 0.001, 0.0001),
    "lenience": (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
    "fuzzy": (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0),
    "random": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "fly": (3.0, 2.0, 1.0, 0.6, 0.3, 0.1, 0.0),
    "asd": (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    "cascade": (-1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 0.8, 1.0),
}


def stops(policy: Policy) -> list[float]:
    """Values of the rule's dial for a slider, strict to lenient, the operator's own among them, none beyond the cap."""
    rule = policy.rule
    if isinstance(rule, LosslessRule):
        return []
    own = dial_value(rule)  # None where the rule has no limit, such as math_symbols without a cap on the rank
    values = {*_STOPS.get(_leading(rule).name, ()), *([] if own is None else [own]), *policy.levels.values()}
    settings = []
    for value in values:
        try:
            settings.append((rule.with_dial(value).leniency, value))
        except SpecError:  # this rule's range is narrower than its family's
            continue
    cap = math.inf if policy.max_threshold is None else rule.with_dial(policy.max_threshold).leniency
    return [float(value) for leniency, value in sorted(settings) if leniency <= cap and math.isfinite(value)]


def _leading(rule: Rule) -> Rule:
    while hasattr(rule, "parts"):
        rule = rule.parts[0]
    return rule


@dataclass(frozen=True)
class Choice:
    """What a request gets: one of the offered rules, in its own setting."""

    name: str
    rule: Rule

    @property
    def strict(self) -> bool:
        return isinstance(self.rule, LosslessRule)

    @property
    def dial(self) -> float | None:
        return None if self.strict else dial_value(self.rule)


class Menu:
    """Rules by name; the first is what a request gets that asks for nothing.

    Args:
        policies: one for each rule offered.

    Raises:
        SpecError: none, or two rules that would share a name.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        if not policies:
            raise SpecError("a server needs at least one rule, got none")
        self.policies: dict[str, Policy] = {}
        for policy in policies:
            if isinstance(policy.rule, LosslessRule) and policy.rule.spec != STRICT.spec:
                raise SpecError(f"rule {policy.rule.spec} cannot be offered; lossless always is, as {SWITCH}=off")
            if any(policy.rule.spec == other.rule.spec for other in self.policies.values()):
                raise SpecError(f"rule {policy.rule.spec} is offered twice")
            name = policy.rule.name if policy.rule.name not in self.policies else policy.rule.spec
            self.policies[name] = policy

    def choose(self, fields: Mapping[str, Any]) -> Choice:
        """The rule and setting a request gets.

        Raises:
            RequestError: a rule that is not offered, or what `Policy.resolve` refuses.
        """
        asked = dict(fields)
        name = asked.get(SWITCH)
        if name is None or name in ("on", "off"):
            name = next(iter(self.policies))
        elif isinstance(name, str) and name in self.policies:
            asked[SWITCH] = "on"
        else:
            raise RequestError(SWITCH, f"{SWITCH} must be one of on, off, {', '.join(self.policies)}, got {name!r}")
        return Choice(name, self.policies[name].resolve(asked))

    def describe(self) -> list[dict[str, Any]]:
        """For clients: each rule, its dial, where a slider may stop, and its certificate."""
        return [
            {
                "name": name,
                "spec": policy.rule.spec,
                "dial": None if isinstance(policy.rule, LosslessRule) else policy.rule.dial,
                "value": dial_value(policy.standard) if not isinstance(policy.standard, LosslessRule) else None,
                "stops": stops(policy),
                "levels": {"strict": None, **policy.levels},
                "certificate": None if policy.certificate is None else policy.certificate.statement,
            }
            for name, policy in self.policies.items()
        ]
