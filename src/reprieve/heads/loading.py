"""Attach heads to rules that name them, and check that they fit: the pair, task, drafter and conditions of use.

`judge:path=heads/j` becomes a rule that can score tokens.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reprieve.bundles import BUNDLED_HEADS, bundle_of
from reprieve.errors import SpecError
from reprieve.heads.artefact import HEADS, Artefact
from reprieve.heads.certificates import Conditions, read_certificates, warn_of_certificates
from reprieve.heads.files import find_head, kind_of
from reprieve.identity import PairIdentity
from reprieve.rules import Rule, parse_rule
from reprieve.rules.learned import HeadRule, LearnedRule
from reprieve.settings import describe_format


def load_head(source: str | Path, *, kind: str | None = None) -> Artefact:
    """Load a head by folder, hub id or name of a bundled head.

    Args:
        kind: judge, pivot, lts, arbiter or length; None accepts any kind.

    Raises:
        SpecError: an unknown kind.
        ReprieveError: not found, of another kind, or tampered with.
    """
    if not isinstance(source, str | Path):
        raise SpecError(f"head must be a folder or a hub id, got {source!r}")
    return HEADS.get(kind or kind_of(source)).from_pretrained(source)


def attach_heads(rule: Rule, target: str | None = None) -> Rule:
    """Return the rule, or composition of rules, with its heads loaded.

    Args:
        target: name of the pair's target. With a bundled target, rules that name no head use the bundled heads. A rule
            with a bundled head and no threshold uses the head's most lenient certified threshold, if it has any.

    Raises:
        SpecError: a rule that names no head and has no bundled one.
        ReprieveError: a head that cannot be loaded.
    """
    bundle = bundle_of(target)
    defaults = {} if bundle is None else bundle.heads

    def attach(part: Rule) -> Rule:
        if not isinstance(part, HeadRule) or part.head is not None:
            return part
        source = part.path or defaults.get(part.head_kind)
        if not source:
            raise SpecError(f"rule {part.name} needs path=FOLDER, a head from `{part.made_by}`")
        if isinstance(part, LearnedRule) and part.threshold is None:
            part = dataclasses.replace(part, threshold=_certified_threshold(part, source))
        return dataclasses.replace(part.with_head(load_head(source, kind=part.head_kind)), source=source)

    return rule.transform(attach)


def _certified_threshold(rule: LearnedRule, source: str) -> float | None:
    """Return the most lenient certified threshold of a bundled head; None where it has none, and for other heads."""
    folder = BUNDLED_HEADS.get(source)
    certificates = [] if folder is None else read_certificates(folder)
    certified = [item.threshold for item in certificates if parse_rule(item.rule).name == rule.name]
    return max(certified, key=lambda value: rule.with_dial(value).leniency, default=None)


def head_folders(rule: Rule) -> dict[str, Path]:
    """Return the folder of each of a rule's heads; heads in memory have none."""
    sources = [leaf.source for leaf in rule.leaves if isinstance(leaf, HeadRule) and leaf.source]
    return {source: find_head(source) for source in sources}


def require_heads_fit(
    rule: Rule, pair: PairIdentity, task: str | None, *, drafter: str | None = None, here: Conditions | None = None
) -> None:
    """Check a rule's heads against the pair and the task they will serve.

    Args:
        drafter: name of the drafter, for a warning if a head was trained on another's tokens; None skips it.
        here: conditions of use, for a warning if this threshold was certified under others; None skips it.

    Raises:
        PairError: a head of another pair.
    """
    for name, head in rule.heads:
        head.require_pair(pair, name)
        if task is not None:
            warn_of_transfer(f"head {name!r}", head.task, task)
        if drafter is not None:
            _warn_of_drafter(name, head, drafter)
        if here is not None:
            _warn_of_conditions(name, head, here)
    if here is not None and rule.heads:
        warn_of_certificates(rule, head_folders(rule), here)


def _warn_of_drafter(name: str, head: Artefact, drafter: str) -> None:
    """Warn if a head judges the tokens of a drafter that it was not trained on.

    Args:
        drafter: its kind; for EAGLE-3, followed by a colon and the head's fingerprint, if known.
    """
    made_for, made_by = str(getattr(head, "drafter", drafter)).partition(":")[::2]
    kind, weights = drafter.partition(":")[::2]
    if made_for != kind or (made_by and weights and made_by != weights):
        other = f"those of {kind}" if made_for != kind else "another head's"
        advice = f": mine labels with --drafter {kind}" if head.kind == "judge" and kind in ("draft", "eagle3") else ""
        warnings.warn(
            f"head {name!r} was trained on tokens of drafter {made_for} and judges {other}; expect wrong answers, "
            f"because judges do not transfer{advice}",
            stacklevel=3,
        )


def _warn_of_conditions(name: str, head: Artefact, here: Conditions) -> None:
    """Warn if a head was made with prompts of another format, or its constants with other sampling settings."""
    if head.prompt is not None and dict(head.prompt) != here.prompt.format:
        warnings.warn(
            f"head {name!r} was made with {describe_format(head.prompt)} and is used with "
            f"{describe_format(here.prompt.format)}; measure accuracy in this format before use",
            stacklevel=3,
        )
    measured = getattr(head, "settings", {}).get("sampling") or {}
    other = [
        f"{key} {getattr(here.sampling, key)} (measured at {measured[key]})"
        for key in sorted(measured)
        if getattr(here.sampling, key, measured[key]) != measured[key]
    ]
    if other:
        warnings.warn(f"{name!r} is used with {', '.join(other)}: calibrate with these settings", stacklevel=3)


def seen_problems(rule: Rule, problems: Sequence[Any]) -> list[Any]:
    """Return the problems that one of the rule's heads was made from, identified by their questions.

    Heads made before 1.0 do not record their problems.

    Args:
        problems: of a task, with `digest`.
    """
    seen = {digest for _, head in rule.heads if isinstance(head, Artefact) for digest in head.problems}
    return [problem for problem in problems if problem.digest in seen]


def name_problems(problems: Sequence[Any]) -> str:
    """Name the first 5 problems and count the rest."""
    names = ", ".join(problem.problem_id for problem in problems[:5])
    more = len(problems) - 5
    return names + (f" and {more} more" if more > 0 else "")


def warn_of_transfer(what: str, made_for: str, used_on: str) -> None:
    """Warn if a head is used on a task other than its own (less accurate in AutoJudge's appendices D and M)."""
    if made_for.partition(":")[0] != used_on.partition(":")[0]:  # settings such as a path do not count
        warnings.warn(
            f"{what} was trained on task {made_for!r} and is used on {used_on!r}; measure accuracy there before use",
            stacklevel=3,
        )
