"""Put heads into rules that name them: `judge:path=heads/j` becomes a rule that can score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from reprieve.errors import SpecError
from reprieve.heads.arbiter import Arbiter
from reprieve.heads.artefact import find_artefact
from reprieve.heads.base import Head
from reprieve.heads.binding import PairIdentity, warn_of_transfer
from reprieve.heads.certificates import Conditions, warn_of_certificates
from reprieve.heads.folds import FoldedHead, read_folds
from reprieve.heads.judge import JudgeHead
from reprieve.heads.lts import LtsCalibration
from reprieve.heads.pivot import PivotHead
from reprieve.rules import Rule, parse_rule

HEADS: dict[str, type[Head] | type[LtsCalibration] | type[Arbiter]] = {
    head.kind: head for head in (JudgeHead, PivotHead, LtsCalibration, Arbiter)
}


def load_head(kind: str, source: str) -> Head | FoldedHead | LtsCalibration | Arbiter:
    """A head of a kind, from a folder or a hub id; a folder of folds gives them all.

    Raises:
        ReprieveError: not found, of another kind, or tampered with.
    """
    if read_folds(source) is not None:
        return FoldedHead.load(source, cast(type[Head], HEADS[kind]).from_pretrained)
    return HEADS[kind].from_pretrained(source)


def split_folds(rule: Rule) -> list[Rule]:
    """The rule once per fold, each with that fold's heads; just the rule where no head has folds.

    Raises:
        SpecError: heads of different numbers of folds.
    """
    sizes = {len(head.heads) for _, head in rule.heads if isinstance(head, FoldedHead)}
    if not sizes:
        return [rule]
    if len(sizes) > 1:
        raise SpecError(f"rule {rule.spec}: its heads must have equally many folds, got {sorted(sizes)}")

    loaded = dict(rule.heads)

    def picker(fold: int) -> Callable[[str, str], Any]:
        def pick(kind: str, source: str) -> Any:
            head = loaded[source]
            return head.heads[fold] if isinstance(head, FoldedHead) else head

        return pick

    return [parse_rule(rule.spec).with_heads(picker(fold)) for fold in range(sizes.pop())]


def attach_heads(rule: Rule) -> Rule:
    """The rule, or composition of rules, with the heads it names loaded.

    Raises:
        ReprieveError: a head that cannot be loaded.
    """
    return rule.with_heads(load_head)


def require_heads_fit(rule: Rule, pair: PairIdentity, task: str | None, *, here: Conditions | None = None) -> None:
    """Check a rule's heads against the pair and the task they are about to serve.

    Args:
        here: all conditions, for a warning where this threshold was certified under others; None to leave that out.

    Raises:
        PairError: a head made for another pair.
    """
    for name, head in rule.heads:
        head.require_pair(pair, name)
        if task is not None:
            warn_of_transfer(f"head {name!r}", head.task, task)
    if here is not None and rule.heads:
        # A head in memory has no folder, and so no certificates.
        warn_of_certificates(rule, {n: find_artefact(n) for n, _ in rule.heads if n not in HEADS}, here)
