"""The arms of a comparison: what decodes, with which rule, at which K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reprieve.drafters import Drafter, DraftModelDrafter, NgramDrafter
from reprieve.engine import SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.heads.loading import attach_heads, require_heads_fit
from reprieve.models import Pair
from reprieve.rules import Rule, parse_rule
from reprieve.rules.spec import parse_parameters

TARGET_ONLY = "target_only"
DRAFT_ONLY = "draft_only"
LOSSLESS = "lossless"


@dataclass(frozen=True)
class Arm:
    """One way of decoding. `label` names it in files and tables and is unique within a run."""

    label: str
    rule: Rule | None  # None for target_only and draft_only
    num_draft_tokens: int

    @property
    def rule_name(self) -> str:
        return self.label if self.rule is None else self.rule.name


def make_arms(specs: Sequence[str | Rule], num_draft_tokens: Sequence[int]) -> list[Arm]:
    """The arms of a run: target-only, draft-only and lossless first, then what was asked, at every K.

    Raises:
        SpecError: a specification that cannot be read, or no K.
    """
    if not num_draft_tokens:
        raise SpecError("num_draft_tokens must name at least one K, got none")
    baselines = [Arm(TARGET_ONLY, None, num_draft_tokens[0]), Arm(DRAFT_ONLY, None, num_draft_tokens[0])]
    rules = [parse_rule(LOSSLESS)]
    for spec in specs:
        if spec in (TARGET_ONLY, DRAFT_ONLY, LOSSLESS):
            continue
        rules.append(attach_heads(parse_rule(spec) if isinstance(spec, str) else spec))
    arms = baselines
    for k in dict.fromkeys(num_draft_tokens):
        suffix = f"@K={k}" if len(set(num_draft_tokens)) > 1 else ""
        arms += [Arm(rule.spec + suffix, rule, k) for rule in rules]
    return list({arm.label: arm for arm in arms}.values())


def sweep_rules(spec: str, thresholds: Sequence[float], *, dial: str | None = None) -> list[Rule]:
    """The rule at each threshold, in the unit and direction of its own parameter (`dial`, the rule's by default).

    Raises:
        SpecError: no thresholds, a value out of range, or a rule without that parameter.
    """
    rule = attach_heads(parse_rule(spec))
    if not thresholds:
        raise SpecError("thresholds must hold at least one value, got none")
    if isinstance(getattr(rule, rule.dial, 0.0), str):
        raise SpecError(f"rule {rule.name} has nothing to sweep")
    return [rule.with_parameter(dial or rule.dial, value) for value in thresholds]


def make_drafter(spec: str, pair: Pair, rule: Rule) -> Drafter:
    """The drafter a specification names: `draft`, or `ngram:max_ngram=3,min_ngram=1`.

    Raises:
        SpecError: unknown drafter or parameter.
    """
    name, _, rest = spec.partition(":")
    given = parse_parameters(rest, where=f"drafter {name}")
    if name == "draft":
        if given:
            raise SpecError(f"drafter draft has no parameters, got {', '.join(given)}")
        return DraftModelDrafter(pair.cached_draft(rule.draft_layers), pair.device)
    if name == "ngram":
        if unknown := given.keys() - {"max_ngram", "min_ngram"}:
            raise SpecError(f"drafter ngram has no parameter {sorted(unknown)[0]!r}; it takes max_ngram, min_ngram")
        try:
            return NgramDrafter(pair.device, **{key: int(value) for key, value in given.items()})
        except ValueError as error:
            raise SpecError(f"drafter ngram: {error}") from None
    raise SpecError(f"drafter must be one of draft, ngram, got {name!r}")


def build_decoder(arm: Arm, pair: Pair, *, drafter: str = "draft", task: str | None = None) -> SpeculativeDecoder:
    """A decoder with caches of its own; models are shared among arms.

    Args:
        task: what it will be used on, for a warning where a head was trained on another; None to leave that out.

    Raises:
        PairError: a head made for another pair.
    """
    if arm.label == TARGET_ONLY:
        return SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    if arm.label == DRAFT_ONLY:
        return SpeculativeDecoder(pair.cached_draft(), None, pair.tokenizer)
    assert arm.rule is not None
    rule = attach_heads(arm.rule)
    require_heads_fit(rule, pair.identity, task)
    return SpeculativeDecoder(
        pair.cached_target(rule.target_layers),
        make_drafter(drafter, pair, rule),
        pair.tokenizer,
        rule=rule,
        num_draft_tokens=arm.num_draft_tokens,
    )
