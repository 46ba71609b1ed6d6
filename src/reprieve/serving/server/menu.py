"""The rules a server offers, and how one request chooses among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.errors import SpecError
from reprieve.rules import LosslessRule, Rule
from reprieve.serving.policy import STRICT, SWITCH, Policy, RequestError


def stops(policy: Policy) -> list[float]:
    """Values of the rule's dial for a slider, strict to lenient, the operator's own among them, none beyond the cap."""
    rule = policy.rule
    if rule.dial is None:
        return []
    own = rule.dial_value  # None where it sets no limit, such as math_symbols without a cap on the rank
    values = {*rule.dial.stops, *([] if own is None else [own]), *policy.levels.values()}
    settings = []
    for value in values:
        try:
            settings.append((rule.with_dial(value).looseness, value))
        except SpecError:  # this rule's range is narrower than its family's
            continue
    cap = math.inf if policy.max_threshold is None else rule.with_dial(policy.max_threshold).looseness
    return [float(value) for looseness, value in sorted(settings) if looseness <= cap and math.isfinite(value)]


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
        return self.rule.dial_value


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
                "dial": None if policy.rule.dial is None else policy.rule.dial.name,
                "value": policy.standard.dial_value,
                "stops": stops(policy),
                "levels": {"strict": None, **policy.levels},
                "certificate": None if policy.certificate is None else policy.certificate.statement,
            }
            for name, policy in self.policies.items()
        ]
