"""Attach heads to rules that name them: `judge:path=heads/j` becomes a rule that can score tokens."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import cast

from reprieve.bundles import BUNDLED_HEADS, bundle_of
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.artefact import HEADS, Artefact
from reprieve.heads.base import Head
from reprieve.heads.binding import PairIdentity, warn_of_transfer
from reprieve.heads.certificates import Conditions, read_certificates, warn_of_certificates
from reprieve.heads.files import find_head, kind_of
from reprieve.heads.folds import FoldedHead, fold_folder, read_folds
from reprieve.heads.length import ANY_RULE, LengthHead
from reprieve.heads.origin import warn_of_drafter, warn_of_format, warn_of_sampling
from reprieve.rules import Rule, parse_rule
from reprieve.rules.learned import HeadRule, LearnedRule
from reprieve.settings import AUTO, NumDraftTokens, named_length, require_draft_tokens


def load_head(source: str | Path, *, kind: str | None = None) -> Artefact | FoldedHead:
    """Load a head by folder, hub id or name of a bundled head; a folder of folds gives all its heads.

    Args:
        kind: judge, pivot, lts, arbiter or length; None accepts any kind.

    Raises:
        SpecError: an unknown kind.
        ReprieveError: not found, of another kind, or tampered with.
    """
    folds = read_folds(source)
    wanted = HEADS.get(kind or kind_of(source if folds is None else fold_folder(source, 0)))
    if folds is not None:
        return FoldedHead.load(source, cast(type[Head], wanted).from_pretrained)
    return wanted.from_pretrained(source)


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
    defaults = {} if bundle is None else bundle.head_names

    def attach(part: Rule) -> Rule:
        if not isinstance(part, HeadRule):
            return part
        default = defaults.get(part.head_kind)
        if isinstance(part, LearnedRule) and part.head is None and part.threshold is None:
            part = dataclasses.replace(part, threshold=_certified_threshold(part, part.path or default))
        return part.with_head(load_head, default)

    return rule.transform(attach)


def _certified_threshold(rule: LearnedRule, source: str | None) -> float | None:
    """Return the most lenient certified threshold of a bundled head; None where it has none, and for other heads."""
    folder = BUNDLED_HEADS.get(source or "")
    certificates = [] if folder is None else read_certificates(folder)
    certified = [item.threshold for item in certificates if parse_rule(item.rule).name == rule.name]
    return max(certified, key=lambda value: rule.with_dial(value).looseness, default=None)


def length_head(num_draft_tokens: NumDraftTokens, rule: Rule, pair: PairIdentity) -> LengthHead | None:
    """Return the draft length head: the named one or, for `auto`, the bundled pair's for this rule; None for no head.

    A bundled head serves all thresholds; outside its training range it uses the nearest one. Rules without a bundled
    length head use that of lossless decoding.

    Raises:
        SpecError: a specification that cannot be read, or a named head of another rule or other thresholds.
        PairError: a named head of another pair.
        ReprieveError: a head that cannot be loaded.
    """
    require_draft_tokens(num_draft_tokens)
    if isinstance(num_draft_tokens, int):
        return None
    if named := named_length(num_draft_tokens):
        head = _named_length(named)
        head.require_pair(pair, named)
        head.require_rule(rule, named)
        return head
    bundle = bundle_of(pair.target)
    names = {} if bundle is None else bundle.head_names
    source = names.get(f"length-{rule.name}") or names.get(f"length-{ANY_RULE}")
    if source is None:
        return None
    head = LengthHead.from_pretrained(source)
    return None if head.pair.differences(pair, reads_draft=True) else head


def fitting_length(num_draft_tokens: NumDraftTokens, rule: Rule) -> NumDraftTokens:
    """Return the draft length for one of several rules; a length head of another rule becomes `auto`.

    Raises:
        SpecError: a specification that cannot be read.
        ReprieveError: a head that cannot be loaded.
    """
    require_draft_tokens(num_draft_tokens)
    if named := named_length(num_draft_tokens):
        return num_draft_tokens if _named_length(named).covers(rule) else AUTO
    return num_draft_tokens


def _named_length(name: str) -> LengthHead:
    try:
        return LengthHead.from_pretrained(name)
    except ReprieveError as error:
        raise ReprieveError(f"num_draft_tokens auto:path={name}: {error}") from None


def split_folds(rule: Rule) -> list[Rule]:
    """Return the rule once per fold, each with that fold's heads; only the rule itself if no head has folds.

    Raises:
        SpecError: heads of different numbers of folds.
    """
    sizes = {len(head.heads) for _, head in rule.heads if isinstance(head, FoldedHead)}
    if not sizes:
        return [rule]
    if len(sizes) > 1:
        raise SpecError(f"rule {rule.spec}: its heads must have the same number of folds, got {sorted(sizes)}")

    def of_fold(part: Rule, fold: int) -> Rule:
        if isinstance(part, HeadRule) and isinstance(part.head, FoldedHead):
            return dataclasses.replace(part, head=part.head.heads[fold])
        return part

    return [rule.transform(functools.partial(of_fold, fold=fold)) for fold in range(sizes.pop())]


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
            warn_of_drafter(name, head, drafter)
        if here is not None:
            warn_of_format(name, head, here.format)
            warn_of_sampling(name, head, here.sampling)
    if here is not None and rule.heads:
        warn_of_certificates(rule, head_folders(rule), here)
