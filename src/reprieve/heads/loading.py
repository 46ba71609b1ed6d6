"""Put heads into rules that name them: `judge:path=heads/j` becomes a rule that can score."""

from __future__ import annotations

from reprieve.heads.base import Head
from reprieve.heads.binding import PairIdentity, warn_of_transfer
from reprieve.heads.judge import JudgeHead
from reprieve.heads.pivot import PivotHead
from reprieve.rules import Rule

HEADS: dict[str, type[Head]] = {head.kind: head for head in (JudgeHead, PivotHead)}


def load_head(kind: str, source: str) -> Head:
    """A head of a kind, from a folder or a hub id.

    Raises:
        ReprieveError: not found, of another kind, or tampered with.
    """
    return HEADS[kind].from_pretrained(source)


def attach_heads(rule: Rule) -> Rule:
    """The rule, or composition of rules, with the heads it names loaded.

    Raises:
        ReprieveError: a head that cannot be loaded.
    """
    return rule.with_heads(load_head)


def require_heads_fit(rule: Rule, pair: PairIdentity, task: str | None) -> None:
    """Check a rule's heads against the pair and the task they are about to serve.

    Raises:
        PairError: a head made for another pair.
    """
    for name, head in rule.heads:
        assert isinstance(head, Head)
        head.require_pair(pair, name)
        if task is not None:
            warn_of_transfer(f"head {name!r}", head.task, task)
