"""Certificates: a promise about a rule at a threshold, its conditions and its evidence.

A certificate is a readable JSON file in its head's folder `certificates/`, or at the path given to `reprieve certify`;
`reprieve.certify` makes certificates.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.files import read_json, record_from
from reprieve.heads.files import CERTIFICATES, signature
from reprieve.identity import EngineIdentity, PairIdentity
from reprieve.rules import Rule, parse_rule
from reprieve.rules.learned import HeadRule
from reprieve.settings import NumDraftTokens, PromptSettings, SamplingSettings, describe_format

SCHEMA = 2
_KIND = "reprieve certificate"


@dataclass(frozen=True, kw_only=True)
class Conditions(EngineIdentity):
    """Conditions of a measurement."""

    pair: PairIdentity
    task: str
    prompt: PromptSettings
    sampling: SamplingSettings
    num_draft_tokens: NumDraftTokens  # K, or `auto` and the fingerprint of the head that decides
    drafter: str
    drafter_weights: str | None = None  # fingerprint of a drafter's own weights; None for the pair's draft

    def differences(self, other: Conditions) -> list[str]:
        """Return the differences from `other`, one short text each; compares weights by fingerprint, tasks by name."""
        certified, actual = self._compared(), other._compared()
        return [
            f"{name} {actual.get(name)} (certified: {certified.get(name)})"
            for name in {**certified, **actual}
            if certified.get(name) != actual.get(name)
        ]

    def _compared(self) -> dict[str, Any]:
        return {
            **{part: getattr(self.pair, part) for part in ("target_weights", "draft_weights", "tokenizer")},
            "task": self.task.partition(":")[0],
            **{name: getattr(self, name) for name in ("num_draft_tokens", "drafter", "drafter_weights")},
            **self.engine_identity,
            "max_new_tokens": self.prompt.max_new_tokens or "the task's",
            "prompt format:": describe_format(self.prompt.format),
            **vars(self.sampling),
        }


@dataclass(frozen=True)
class Certificate:
    """Promise and its evidence.

    Args:
        statement: the promise in a sentence.
        rule: the rule's specification, threshold included, with heads named by their paths.
        portable_rule: the same with heads named by fingerprint; valid after heads have been moved.
        threshold: the certified value of the rule's dial.
        promise: max_drop, confidence and loss.
        verdict: `confirmed` if the held-out problems prove the promise again, `consistent` if they agree with it.
        calibration, held_out: split, problems and observations; calibration lists every threshold tried.
        made_with: command, versions, machine, commit.
    """

    statement: str
    rule: str
    portable_rule: str
    threshold: float
    promise: Mapping[str, Any]
    verdict: str
    conditions: Conditions
    calibration: Mapping[str, Any]
    held_out: Mapping[str, Any]
    made_with: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the file's content: JSON with a SHA-256 digest."""
        values = {"kind": _KIND, "schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps({**values, "sha256": signature(values)}, indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        """Read a certificate.

        Raises:
            ReprieveError: the file cannot be read, is not a certificate, was changed, or is inconsistent.
        """
        try:
            values = read_json(path, "certificate")
            if not isinstance(values, dict) or values.get("kind") != _KIND:
                raise ValueError(f"it is not a {_KIND}")
            if values.pop("sha256", None) != signature(values):
                raise ValueError("it was changed after it was made: certify again")
            del values["kind"]
            if (schema := values.pop("schema", None)) != SCHEMA:
                raise ValueError(f"it has schema {schema}, this version reads {SCHEMA}: certify again")
            certificate = record_from(cls, values, exact=True, signed=True)
            certificate._require_agreement()
            return certificate
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReprieveError(f"certificate {str(path)!r} cannot be read: {error}") from None

    def _require_agreement(self) -> None:
        """Refuse a certificate whose `rule`, `portable_rule` and `threshold` disagree."""
        rule, portable = parse_rule(self.rule), parse_rule(self.portable_rule)
        if pathless_spec(rule) != pathless_spec(portable):
            raise SpecError(
                f"rule and portable_rule must be the same but for paths, got {rule.spec} and {portable.spec}"
            )
        if rule.dial_value != self.threshold:
            raise SpecError(f"threshold must be what rule {rule.spec} says, got {self.threshold!r}")

    def check(self, here: Conditions, *, where: str) -> None:
        """Warn if the conditions differ; refuse another pair or another prompt format.

        Raises:
            PairError: other weights or another tokenizer.
            SpecError: another prompt format.
        """
        self.conditions.pair.require_matches(here.pair, f"the certificate {where}", reads_draft=True)
        if self.conditions.prompt.format != here.prompt.format:
            raise SpecError(
                f"the certificate {where} was made with {describe_format(self.conditions.prompt.format)}, here it is "
                f"{describe_format(here.prompt.format)}: its promise does not cover these prompts"
            )
        if differing := self.conditions.differences(here):
            warnings.warn(
                f"the certificate {where} does not hold here: {'; '.join(differing)}; certify again, or use its "
                "conditions",
                stacklevel=3,
            )


def portable_spec(rule: Rule) -> str:
    """Return the rule's specification with its heads named by fingerprint instead of by folder."""
    return _renamed(rule, lambda part: part.path if part.head is None else part.head.fingerprint)


def pathless_spec(rule: Rule) -> str:
    """Return the rule's specification without the paths of its heads."""
    return _renamed(rule, lambda _: "")


def _renamed(rule: Rule, path: Callable[[HeadRule], str]) -> str:
    """Return a rule's specification with each head's path replaced by `path`."""
    return rule.transform(
        lambda part: dataclasses.replace(part, path=path(part)) if isinstance(part, HeadRule) else part
    ).spec


def read_certificates(folder: Path) -> list[Certificate]:
    """Return all certificates in a head's folder, by name.

    Raises:
        ReprieveError: one of them cannot be read.
    """
    return [Certificate.load(path) for path in sorted((folder / CERTIFICATES).glob("*.json"))]


def warn_of_certificates(rule: Rule, folders: Mapping[str, Path], here: Conditions) -> None:
    """Warn if a rule's threshold was certified under other conditions; silent if a certificate holds here.

    Args:
        folders: folder of each of the rule's heads.
    """
    spec = portable_spec(rule)
    matching = [item for folder in folders.values() for item in read_certificates(folder) if item.portable_rule == spec]
    nearest = min(matching, key=lambda item: len(item.conditions.differences(here)), default=None)
    if nearest is None or not nearest.conditions.differences(here):
        return
    try:
        nearest.check(here, where=f"of {rule.spec}")
    except (PairError, SpecError) as error:
        warnings.warn(str(error), stacklevel=2)
