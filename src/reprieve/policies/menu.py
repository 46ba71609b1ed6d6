"""The rules a server offers, and how one request chooses among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reprieve.errors import SpecError
from reprieve.policies.policy import CHOICES, REQUIRE, STRICT, SWITCH, Policy, RequestError, read_flag, read_settings
from reprieve.rules import LosslessRule, Rule
from reprieve.types import Need

STRICT_ONLY = "strict_only"
STRUCTURED_OUTPUTS = "structured_outputs"  # among a request's fields: it has a grammar or a schema


def slider_values(policy: Policy) -> list[float]:
    """Return slider stops of the rule's dial, strict to lenient: its usual ones and the operator's, up to the cap."""
    rule = policy.rule
    if rule.dial is None:
        return []
    own = rule.dial_value  # None where it sets no limit, such as math_symbols without a cap on the rank
    values = {*rule.dial.stops, *([] if own is None else [own]), *policy.levels.values()}
    settings = []
    for value in values:
        try:
            settings.append((rule.with_dial(value).leniency, value))
        except SpecError:  # this rule's range is narrower than its family's
            continue
    cap = math.inf if policy.max_threshold is None else rule.with_dial(policy.max_threshold).leniency
    return [float(value) for leniency, value in sorted(settings) if leniency <= cap and math.isfinite(value)]


@dataclass(frozen=True)
class Choice:
    """Rule of one request: one of the offered rules, in the request's own setting."""

    name: str
    rule: Rule
    follows_load: bool = False  # the request chose nothing: the operator's `by_load` decides in each round

    @property
    def strict(self) -> bool:
        return isinstance(self.rule, LosslessRule)


class Menu:
    """The offered rules by name; requests that name no rule get the first.

    Args:
        policies: one for each offered rule.
        strict_only: decode every request losslessly, and refuse requests that ask for leniency.

    Raises:
        SpecError: no rules, the same rule twice, or a variant of the lossless rule.
    """

    def __init__(self, policies: Sequence[Policy], *, strict_only: bool = False) -> None:
        self.strict_only = strict_only
        if not policies:
            raise SpecError("a server needs at least one rule, got none")
        self.policies: dict[str, Policy] = {}
        for policy in policies:
            if isinstance(policy.rule, LosslessRule) and policy.rule.spec != STRICT.spec:
                raise SpecError(f"rule {policy.rule.spec} cannot be offered; lossless always is, as {SWITCH}=off")
            if any(policy.rule.spec == other.rule.spec for other in self.policies.values()):
                raise SpecError(f"rule {policy.rule.spec} is offered twice")
            name = _name_of(policy.rule)
            name = policy.rule.spec if name in self.policies else name
            self.policies[name] = policy

    @classmethod
    def load(cls, source: str | Mapping[str, Any], *, target: str | None = None) -> Menu:
        """Load from a rule's specification, a JSON file, or its content; `{"rules": [...]}` lists several of these.

        Raises:
            ReprieveError: see `Policy.load`.
            SpecError: see `Policy.load`.
        """
        settings = read_settings(source)
        strict_only = read_flag(settings, STRICT_ONLY)
        settings.pop(STRICT_ONLY, None)
        offered = settings.get("rules", [settings])
        if not isinstance(offered, list) or not offered or ("rules" in settings and len(settings) > 1):
            raise SpecError(f"rules must stand alone and be a list of rules, got {settings!r}")
        loaded = [Policy.load(item, target=target) for item in offered]
        return cls(loaded, strict_only=strict_only)

    def map_policies(self, change: Callable[[Policy], Policy]) -> Menu:
        """The same rules, by the same names, with a change made to each policy."""
        menu = Menu(list(self.policies.values()), strict_only=self.strict_only)
        menu.policies = {name: change(policy) for name, policy in self.policies.items()}
        return menu

    @property
    def rules(self) -> list[Rule]:
        """The operator's rules, as they stand."""
        return [policy.rule for policy in self.policies.values()]

    @cached_property
    def needs(self) -> frozenset[Need]:
        """Union of the inputs that the rules read."""
        return frozenset().union(*(rule.traits.needs for rule in self.rules))

    @cached_property
    def reads_raw_logits(self) -> bool:
        """True if a rule, such as a head, also reads the model's distribution before sampling parameters."""
        states = {Need.NODE_HIDDEN, Need.PARENT_HIDDEN}
        return bool(states & self.needs) or any(rule.traits.beyond_truncation for rule in self.rules)

    def choose(self, fields: Mapping[str, Any] | None, *, num_running: int = 1) -> Choice:
        """Return the rule and setting that a request gets while `num_running` requests are running.

        Raises:
            RequestError: a rule that is not offered, leniency that the server or `reprieve_require` excludes, or what
                `Policy.resolve` refuses.
        """
        remaining = dict(fields or {})
        structured = bool(remaining.pop(STRUCTURED_OUTPUTS, False))
        required = remaining.pop(REQUIRE, None)
        choice = self._choice(remaining, num_running)
        if structured and self.policies[choice.name].strict_structured_outputs:
            choice = Choice(choice.name, STRICT)
        self._require(required, choice)
        return choice

    def _choice(self, fields: dict[str, Any], num_running: int) -> Choice:
        name = fields.get(SWITCH)
        if name is None or name in ("on", "off"):
            name = next(iter(self.policies))
        elif isinstance(name, str) and name in self.policies:
            fields[SWITCH] = "on"
        else:
            raise RequestError(SWITCH, f"{SWITCH} must be one of on, off, {', '.join(self.policies)}, got {name!r}")
        silent = not any(fields.get(field) not in (None, "on") for field in CHOICES)
        policy = self.policies[name]
        if self.strict_only:
            if not silent and not isinstance(policy.resolve(fields), LosslessRule):
                given = ", ".join(field for field in CHOICES if fields.get(field) not in (None, "on"))
                raise RequestError(given.split(", ")[0], f"{given}: this server decodes losslessly only (strict_only)")
            policy.resolve({name: value for name, value in fields.items() if name not in CHOICES})
            return Choice(name, STRICT)
        if silent and policy.by_load:
            return Choice(name, policy.at_load(num_running), follows_load=True)
        return Choice(name, policy.resolve(fields))

    def _require(self, required: Any, choice: Choice) -> None:
        """Refuse a request that would get more leniency than its `reprieve_require` allows."""
        if required is None:
            return
        if required not in ("lossless", "certified"):
            raise RequestError(REQUIRE, f"{REQUIRE} must be one of lossless, certified, got {required!r}")
        policy = self.policies[choice.name]
        for rule in policy.reachable if choice.follows_load else [choice.rule]:
            if not isinstance(rule, LosslessRule) and not (required == "certified" and policy.covers(rule)):
                level = "certified" if required == "certified" and "certified" in policy.levels else "strict"
                raise RequestError(
                    REQUIRE,
                    f"{REQUIRE}={required}: this request would get {choice.name} at {rule.dial_value}, which is not "
                    f"{required} on this server; ask for reprieve_leniency={level}",
                )

    def describe(self) -> list[dict[str, Any]]:
        """Describe each rule for clients: its dial, slider stops, levels and certificate."""
        return [
            {
                "name": name,
                "spec": policy.rule.spec,
                "dial": None if policy.rule.dial is None else policy.rule.dial.name,
                "value": policy.default_rule.dial_value,
                "stops": slider_values(policy),
                "levels": {"strict": None, **policy.levels},
                "certificate": None if policy.certificate is None else policy.certificate.statement,
            }
            for name, policy in self.policies.items()
        ]


def _name_of(rule: Rule) -> str:
    """Return the rule's name without its restrictions: requests select margin in thinking as `margin`."""
    while len(rule.parts) == 1:
        rule = rule.parts[0]
    return rule.name
