"""Policy for the rule settings of requests, the same on vLLM and on the local server.

A request names a threshold, a level (`strict`, `certified`, `fast`), or switches the rule off. The operator says what
the levels mean and how far a request may go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reprieve.errors import ReprieveError, SpecError
from reprieve.files import read_json
from reprieve.heads.certificates import Certificate, portable_spec, read_certificates
from reprieve.heads.loading import attach_heads, head_folders
from reprieve.rules import LosslessRule, Rule, parse_rule

# Request fields that choose a rule.
THRESHOLD, SWITCH, LEVEL = "reprieve_threshold", "reprieve_rule", "reprieve_leniency"
REQUIRE = "reprieve_require"  # selects nothing: the request is refused if it would get a weaker guarantee
PREFIX = "reprieve_"
CHOICES = (THRESHOLD, SWITCH, LEVEL)
FIELDS = (*CHOICES, REQUIRE)
LEVELS = ("strict", "certified", "fast")
STRICT = LosslessRule()
_LONGEST_NAME = 100
_LONGEST_MESSAGE = 500  # characters; messages are logged and quote the client's input
STRICT_STRUCTURED = "strict_structured_outputs"
_KEYS = ("rule", "certified", "fast", "default", "max_threshold", "certificate", "by_load", STRICT_STRUCTURED)


class RequestError(SpecError):
    """Invalid or refused request; `parameter` names the field, if it is one field's fault."""

    def __init__(self, parameter: str | None, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}...")
        self.parameter = parameter


@dataclass(frozen=True)
class Policy:
    """The operator's rule, what the levels mean, and the cap.

    Args:
        rule: used for requests that choose nothing, if there is no `default`; heads attached.
        levels: dial values of `certified` and `fast`, where they are set; `strict` is always the lossless check.
        default: level of requests that choose nothing; None for the rule at its own setting.
        max_threshold: most lenient dial value that a request may choose; None for no cap.
        certificates: certificates of the rule, the most lenient first; the first is that of the `certified` level.
        by_load: pairs of a minimum number of running requests and a dial value, for requests that choose nothing. The
            last pair that applies wins; below the first, the default applies.
        certificate_mismatch: reason why no certificate that was found holds here; empty if one does, or none was found.
        strict_structured_outputs: decode requests with structured outputs (a grammar, a schema) losslessly.

    Raises:
        SpecError: an unknown level, a value out of the dial's range, or a level beyond the cap.
    """

    rule: Rule
    levels: Mapping[str, float] = field(default_factory=dict)
    default: str | None = None
    max_threshold: float | None = None
    certificates: tuple[Certificate, ...] = ()
    by_load: tuple[tuple[int, float], ...] = ()
    certificate_mismatch: str = ""
    strict_structured_outputs: bool = False

    def __post_init__(self) -> None:
        if self.max_threshold is not None:
            self.rule.with_dial(self.max_threshold)
        for level, value in self.levels.items():
            if level not in LEVELS[1:]:
                raise SpecError(f"levels must be among certified, fast, got {level!r}")
            self._require_within_cap(self.rule.with_dial(value), level)
        at = {level: self.rule.with_dial(value).leniency for level, value in self.levels.items()}
        if len(at) == 2 and at["fast"] < at["certified"]:
            raise SpecError(
                f"fast must be no stricter than certified ({self.levels['certified']:g}), got {self.levels['fast']:g}"
            )
        if self.default is not None and self.default != "strict" and self.default not in self.levels:
            known = ", ".join(("strict", *self.levels))
            raise SpecError(f"default must be one of {known}, got {self.default!r}")
        self._require_within_cap(self.rule, "rule")
        self._require_loads()

    def _require_loads(self) -> None:
        counts = [count for count, _ in self.by_load]
        if counts != sorted(set(counts)) or any(count < 1 for count in counts):
            raise SpecError(f"by_load must have distinct request counts of 1 or more, in rising order, got {counts}")
        certified = self.certificate and self.rule.with_dial(self.certificate.threshold)
        for count, value in self.by_load:
            rule = self.rule.with_dial(value)
            self._require_within_cap(rule, f"by_load at {count} requests")
            if certified and rule.leniency > certified.leniency:
                raise SpecError(
                    f"by_load at {count} requests must be no more lenient than the certificate allows "
                    f"({certified.dial_value:g}), got {value:g}"
                )

    @classmethod
    def load(cls, source: str | Mapping[str, Any], *, target: str | None = None) -> Policy:
        """Load from a rule's specification, a JSON file, or its content.

        A certificate that is named, or stored with the rule's head, sets the `certified` level unless it is given.

        Args:
            target: name of the pair's target, whose bundled heads are used if the rule names none.

        Raises:
            ReprieveError: a file that cannot be read, unknown keys, a head that cannot be loaded.
            SpecError: a rule or a value that cannot be read.
        """
        settings = read_settings(source)
        if unknown := settings.keys() - set(_KEYS):
            names = ", ".join(sorted(map(str, unknown)))
            raise SpecError(
                f"a policy takes {', '.join(_KEYS)}, got {names}; a file for vLLM also takes rules and strict_only"
            )
        if not isinstance(settings.get("rule"), str):
            raise SpecError(f"the configuration needs rule, a specification such as margin:delta=2, got {settings!r}")
        for key in ("default", "certificate"):
            if not isinstance(settings.get(key), str | None):
                raise SpecError(f"{key} must be a text, got {settings[key]!r}")
        rule = attach_heads(parse_rule(settings["rule"]), target)
        levels = {level: _number(level, settings[level]) for level in LEVELS[1:] if level in settings}
        certificates = _certificates(rule, settings.get("certificate"), levels.get("certified"))
        if certificates:
            levels.setdefault("certified", certificates[0].threshold)
        cap = settings.get("max_threshold")
        return cls(
            rule,
            levels=levels,
            default=settings.get("default"),
            max_threshold=None if cap is None else _number("max_threshold", cap),
            certificates=tuple(certificates),
            by_load=_loads(settings.get("by_load")),
            strict_structured_outputs=read_flag(settings, STRICT_STRUCTURED),
        )

    @property
    def certificate(self) -> Certificate | None:
        """The most lenient certificate, which covers the `certified` level; None if there is none."""
        return next(iter(self.certificates), None)

    def for_conditions(self, **conditions: Any) -> Policy:
        """Return the policy on a server with these conditions: fields of `Conditions`, None if unknown.

        The most lenient certificate that holds here is kept. If none holds, all are set aside, together with the
        `certified` level that they set.

        Raises:
            SpecError: `certified` is the default, but neither the operator nor a certificate that holds sets it.
        """
        if self.certificate is None:
            return self
        holding = tuple(one for one in self.certificates if not _differences(one, conditions))
        if len(holding) == len(self.certificates):
            return self
        set_by_operator = self.levels.get("certified") != self.certificate.threshold
        levels = {level: value for level, value in self.levels.items() if level != "certified" or set_by_operator}
        if holding:
            levels.setdefault("certified", holding[0].threshold)
            return dataclasses.replace(self, levels=levels, certificates=holding)
        nearest = min(self.certificates, key=lambda one: len(_differences(one, conditions)))
        reasons = "; ".join(_differences(nearest, conditions))
        if self.default is not None and self.default not in ("strict", *levels):
            raise SpecError(f"default {self.default}: the certificate does not hold here: {reasons}")
        return dataclasses.replace(self, levels=levels, certificates=(), certificate_mismatch=reasons)

    @cached_property
    def default_rule(self) -> Rule:
        """The rule of requests that choose nothing."""
        return self.rule if self.default is None else self._at_level(self.default)

    def at_load(self, num_running: int) -> Rule:
        """Return the rule of requests that choose nothing while `num_running` requests are running."""
        rules = [rule for count, rule in self._rules_by_load if num_running >= count]
        return rules[-1] if rules else self.default_rule

    @cached_property
    def _rules_by_load(self) -> list[tuple[int, Rule]]:
        return [(count, self.rule.with_dial(value)) for count, value in self.by_load]

    @cached_property
    def named_values(self) -> frozenset[float | None]:
        """Values of the dial that the operator set: the rule's own, those of the levels and of the loads."""
        return frozenset((self.rule.dial_value, *self.levels.values(), *(value for _, value in self.by_load)))

    @property
    def reachable(self) -> list[Rule]:
        """All rules that a request that chooses nothing can get, under any load."""
        return [self.default_rule, *(rule for _, rule in self._rules_by_load)]

    def covers(self, rule: Rule) -> bool:
        """Return whether the certificate covers a setting of the rule; the lossless check needs none."""
        if isinstance(rule, LosslessRule):
            return True
        certificate = self.certificate
        return certificate is not None and rule.leniency <= self.rule.with_dial(certificate.threshold).leniency

    def resolve(self, fields: Mapping[str, Any] | None) -> Rule:
        """Return the rule that a request's fields (`FIELDS`) select; other fields are ignored.

        Raises:
            RequestError: an invalid value, an unknown `reprieve_` field, conflicting choices, or more leniency than the
                operator allows.
        """
        given_fields = fields or {}
        for name in given_fields:
            if name.startswith(PREFIX) and name not in FIELDS:
                shown = name if name.isprintable() and len(name) < _LONGEST_NAME else repr(name[:_LONGEST_NAME])
                raise RequestError(shown, f"{shown} is not known; a request may give {', '.join(FIELDS)}")
        given = {name: given_fields[name] for name in CHOICES if given_fields.get(name) is not None}
        if SWITCH in given:
            switch = given.pop(SWITCH)
            if switch not in ("on", "off"):
                raise RequestError(SWITCH, f"{SWITCH} must be one of on, off, got {switch!r}")
            if switch == "off":
                if given:
                    raise RequestError(SWITCH, f"{SWITCH}=off cannot be combined with {', '.join(given)}")
                return STRICT
        if len(given) > 1:
            raise RequestError(THRESHOLD, f"give {THRESHOLD} or {LEVEL}, not both")
        if LEVEL in given:
            return self._requested_level(given[LEVEL])
        return self._requested_threshold(given[THRESHOLD]) if given else self.default_rule

    def _requested_level(self, level: Any) -> Rule:
        known = ("strict", *(name for name in LEVELS[1:] if name in self.levels))
        if level not in known:
            raise RequestError(LEVEL, f"{LEVEL} must be one of {', '.join(known)} on this server, got {level!r}")
        return self._at_level(level)

    def _at_level(self, level: str) -> Rule:
        return STRICT if level == "strict" else self.rule.with_dial(self.levels[level])

    def _requested_threshold(self, value: Any) -> Rule:
        if self.rule.dial is None:
            reason = f"{THRESHOLD}: this server's rule is {self.rule.name}, which has no threshold"
            raise RequestError(THRESHOLD, reason)
        try:
            rule = self.rule.with_dial(_number(THRESHOLD, value))
            self._require_within_cap(rule, THRESHOLD)
        except SpecError as error:
            reason = str(error).removeprefix(f"{THRESHOLD} ")
            raise RequestError(
                THRESHOLD, f"{THRESHOLD} ({self.rule.dial.name} of {self.rule.name}): {reason}"
            ) from None
        return rule

    def _require_within_cap(self, rule: Rule, what: str) -> None:
        if self.max_threshold is not None and rule.leniency > self.rule.with_dial(self.max_threshold).leniency:
            limit = f"{rule.dial.name}={self.max_threshold:g}" if rule.dial is not None else "lossless"
            raise SpecError(f"{what} must be no more lenient than {limit}, got {rule.dial_value!r}")

    def describe(self) -> str:
        """The line a server logs when it starts: what is active, and which certificate covers it."""
        levels = ", ".join(["strict", *(f"{level}={value:g}" for level, value in self.levels.items())])
        text = f"rule {self.rule.spec}; default {self.default or 'the rule as configured'}; levels {levels}"
        if self.by_load:
            text += f"; by load {', '.join(f'{count}: {value:g}' for count, value in self.by_load)}"
        if self.max_threshold is not None and self.rule.dial is not None:
            text += f"; requests may ask up to {self.rule.dial.name}={self.max_threshold:g}"
        if self.certificate_mismatch:
            return f"{text}; its certificate does not hold here: {self.certificate_mismatch}"
        if self.certificate is None:
            return text + "; no certificate covers it"
        return (
            text
            + ("; certificate: " if self.covers(self.default_rule) else "; MORE LENIENT than its certificate: ")
            + (self.certificate.statement)
        )


def read_settings(source: Any) -> dict[str, Any]:
    """Return the settings from a rule's specification, a JSON file's path, or its content.

    Raises:
        ReprieveError: a file that cannot be read.
        SpecError: neither a text nor an object.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str):
        raise SpecError(f"the configuration must be a rule, a file's path or an object, got {source!r}")
    if not source.endswith(".json"):
        return {"rule": source}
    settings = read_json(source, "the configuration")
    if not isinstance(settings, dict):
        raise ReprieveError(f"the configuration {source!r} must hold a JSON object, got {type(settings).__name__}")
    return settings


def read_flag(settings: Mapping[str, Any], key: str) -> bool:
    """Return a switch of the configuration; off if it is not given.

    Raises:
        SpecError: neither true nor false.
    """
    value = settings.get(key, False)
    if not isinstance(value, bool):
        raise SpecError(f"{key} must be true or false, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        raise SpecError(f"{name} must fit in a float, got an integer of {value.bit_length()} bits") from None
    raise SpecError(f"{name} must be a number, got {value!r}")


def _loads(given: Any) -> tuple[tuple[int, float], ...]:
    """Parse `{"8": 0.02, "32": 0.04}`: dial values by number of running requests, as strings because of JSON."""
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(str(count).isdecimal() for count in given):
        raise SpecError(f"by_load must map numbers of running requests to values of the dial, got {given!r}")
    return tuple(sorted((int(count), _number("by_load", value)) for count, value in given.items()))


def _differences(certificate: Certificate, conditions: Mapping[str, Any]) -> list[str]:
    """Return the conditions that are known to differ from those of a certificate."""
    certified = certificate.conditions
    return [
        f"{name} {value} (certified: {getattr(certified, name)})"
        for name, value in conditions.items()
        if value is not None and _comparable(name, value) != _comparable(name, getattr(certified, name))
    ]


def _comparable(name: str, value: Any) -> Any:
    """Reduce a condition to the part that a server can check: of a drafter, vLLM reports only the kind."""
    return str(value).partition(":")[0] if name == "drafter" else value


def _certificates(rule: Rule, path: str | None, threshold: float | None) -> list[Certificate]:
    """Return the certificate at `path`, else those of the heads (at `threshold`, if given), the most lenient first."""
    if path is not None:
        named = Certificate.load(path)
        if portable_spec(rule.with_dial(named.threshold)) != named.portable_rule:
            raise SpecError(f"certificate {path!r} is about {named.rule}, not about {rule.spec}")
        return [named]
    certificates = [item for folder in head_folders(rule).values() for item in read_certificates(folder)]
    fitting = [
        item
        for item in certificates
        if portable_spec(rule.with_dial(item.threshold)) == item.portable_rule
        and (threshold is None or item.threshold == threshold)
    ]
    return sorted(fitting, key=lambda item: -rule.with_dial(item.threshold).leniency)
