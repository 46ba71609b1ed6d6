"""Checks of a head's origin: its training problems, prompt format, sampling settings and drafter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from reprieve.heads.artefact import Artefact
from reprieve.heads.folds import FoldedHead, fold_of
from reprieve.rules import Rule
from reprieve.settings import describe_format

_SHOWN = 5


class Problem(Protocol):
    """Name of a problem and digest of its question."""

    @property
    def problem_id(self) -> str: ...

    @property
    def digest(self) -> str: ...


P = TypeVar("P", bound=Problem)


def seen_problems(rule: Rule, problems: Sequence[P]) -> list[P]:
    """Return the problems that one of the rule's heads was made from, identified by their questions.

    For out-of-fold heads, each problem is checked against the head that was not trained on it. Heads made before 1.0 do
    not record their problems.
    """
    found = []
    for problem in problems:
        heads = (_answering(head, problem) for _, head in rule.heads)
        if any(problem.digest in head.problems for head in heads if head is not None):
            found.append(problem)
    return found


def name_problems(problems: Sequence[Problem]) -> str:
    """Name the first few problems and count the rest."""
    names = ", ".join(problem.problem_id for problem in problems[:_SHOWN])
    more = len(problems) - _SHOWN
    return names + (f" and {more} more" if more > 0 else "")


def warn_of_format(name: str, head: Artefact | FoldedHead, here: Mapping[str, Any]) -> None:
    """Warn if prompts have a format other than in a head's training."""
    first = head.heads[0] if isinstance(head, FoldedHead) else head
    if first.prompt is not None and dict(first.prompt) != dict(here):
        warnings.warn(
            f"head {name!r} was made with {describe_format(first.prompt)} and is used with {describe_format(here)}; "
            "measure accuracy in this format before use",
            stacklevel=4,
        )


def warn_of_sampling(name: str, head: Artefact | FoldedHead, here: Mapping[str, Any]) -> None:
    """Warn if constants were measured with other sampling settings, which change the margins."""
    measured = getattr(head, "settings", {}).get("sampling") or {}
    other = [
        f"{key} {here[key]} (measured at {measured[key]})"
        for key in sorted(measured)
        if here.get(key, measured[key]) != measured[key]
    ]
    if other:
        warnings.warn(f"{name!r} is used with {', '.join(other)}: calibrate with these settings", stacklevel=4)


def warn_of_drafter(name: str, head: Artefact | FoldedHead, drafter: str) -> None:
    """Warn if a head judges the tokens of a drafter that it was not trained on.

    Args:
        drafter: its kind; for EAGLE-3, followed by a colon and the head's fingerprint, if known.
    """
    first = head.heads[0] if isinstance(head, FoldedHead) else head
    made_for, made_by = str(getattr(first, "drafter", drafter)).partition(":")[::2]
    kind, weights = drafter.partition(":")[::2]
    if made_for != kind or (made_by and weights and made_by != weights):
        other = f"those of {kind}" if made_for != kind else "another head's"
        advice = f": mine labels with --drafter {kind}" if first.kind == "judge" and kind in ("draft", "eagle3") else ""
        warnings.warn(
            f"head {name!r} was trained on tokens of drafter {made_for} and judges {other}; expect wrong answers, "
            f"because judges do not transfer{advice}",
            stacklevel=4,
        )


def _answering(head: Any, problem: Problem) -> Artefact | None:
    if isinstance(head, FoldedHead):
        head = head.heads[fold_of(problem.problem_id, len(head.heads))]
    return head if isinstance(head, Artefact) else None
