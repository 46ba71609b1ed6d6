"""The arms of a comparison: decoding method, rule and K."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.drafters import DRAFTERS
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY, Pair, SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError, require_choice
from reprieve.heads.certificates import Certificate, Conditions, pathless_spec
from reprieve.heads.length import draft_tokens_for
from reprieve.heads.loading import attach_heads
from reprieve.rules import Rule, parse_rule
from reprieve.settings import (
    AUTO,
    NumDraftTokens,
    length_head_path,
    read_draft_tokens,
    require_draft_tokens,
    wrapped_seed,
)
from reprieve.specs import parse_parameters, split

LOSSLESS = "lossless"
RERUN = "lossless_rerun"  # lossless against lossless: the noise floor
CERTIFIED = "certified:"  # the rule, threshold and K of a certificate
DIRECT = "direct:"  # the target alone, sampling from what a truncating rule would accept
VLLM = "vllm:"  # a verification method of vLLM itself, without the plugin
VLLM_METHODS = ("block", "synthetic", "fly")
_RERUN_SEED = 7919
_PREFIXES = (DIRECT.rstrip(":"), CERTIFIED.rstrip(":"), VLLM.rstrip(":"))
_OWN = re.compile(r"@(?=K=|drafter=)")  # what follows a rule in an arm


@dataclass(frozen=True)
class Arm:
    """One way of decoding, heads included; plain data that can be sent to another process.

    Its names, for `judge:path=heads/j,threshold=0.1@K=8`: `name` is `judge:path=heads/j,threshold=0.1`, `label` adds
    `@K=8`, `short_label` is `judge:threshold=0.1@K=8`, and `rule_name` is `judge`.

    Args:
        name: the rule's specification, or a name of its own for arms such as target_only and lossless_rerun.
        rule: None for target_only, draft_only and direct.
        names_k: whether its label names K.
        truncation: of a direct arm.
        certificate: of a certified arm.
        seed_shift: added to the run's seed, so that a rerun draws other tokens.
        drafter: the arm's own drafter; None for the run's.
        vllm: further entries of vLLM's speculative configuration, for one of vLLM's own methods.
    """

    name: str
    rule: Rule | None
    num_draft_tokens: NumDraftTokens
    names_k: bool = False
    truncation: Rule | None = None
    certificate: Certificate | None = None
    seed_shift: int = 0
    drafter: str | None = None
    vllm: tuple[tuple[str, Any], ...] = ()

    @property
    def alone(self) -> str | None:
        """The model that answers alone in this arm, "target" or "draft"; None for other arms."""
        return {TARGET_ONLY: "target", DRAFT_ONLY: "draft"}.get(self.name)

    @property
    def label(self) -> str:
        """Its name in files and tables, as `bench --arm` takes it; unique within a run."""
        return self.name + self._suffix

    @property
    def short_label(self) -> str:
        """The label without the paths of heads, for charts."""
        return (self.rule_name if self._named else pathless_spec(self.rule)) + self._suffix if self.rule else self.name

    @property
    def rule_name(self) -> str:
        """The rule's name without parameters, or the arm's where it has no rule of its own."""
        if self.truncation is not None:
            return DIRECT + self.truncation.name
        return self.name if self._named or self.rule is None else self.rule.name

    @property
    def _named(self) -> bool:
        """True for arms that decode by a rule and have another name."""
        return bool(self.seed_shift or self.vllm)

    @property
    def _suffix(self) -> str:
        k = f"@K={self.num_draft_tokens}" if self.names_k else ""
        return k + (f"@drafter={self.drafter}" if self.drafter else "")

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return a run's sampling for this arm. A direct arm always samples: greedy, it would equal the target."""
        if self.truncation is None:
            return dataclasses.replace(params, seed=wrapped_seed(params.seed + self.seed_shift))
        return dataclasses.replace(params, truncation=self.truncation, temperature=params.temperature or 1.0)

    def decoder(
        self, pair: Pair, *, drafter: str = "draft", task: str | None = None, conditions: Conditions | None = None
    ) -> SpeculativeDecoder:
        """A decoder with caches of its own; arguments as `Pair.decoder` has them.

        Raises:
            PairError: a head made for another pair.
        """
        rule = (DRAFT_ONLY if self.alone == "draft" else TARGET_ONLY) if self.rule is None else self.rule
        drafter = self.drafter or drafter
        return pair.decoder(
            rule,
            num_draft_tokens=self.num_draft_tokens,
            drafter=drafter,
            task=task,
            conditions=self.unchecked(conditions),
        )

    def unchecked(self, conditions: Conditions | None) -> Conditions | None:
        """Return the conditions to check against the certificates in its head's folder; None if one was named.

        The run itself checks a named certificate against its conditions.
        """
        return None if self.certificate is not None else conditions


def rule_of(label: str) -> str:
    """Return the rule in an arm's label, without its own K and drafter."""
    return _OWN.split(label)[0]


def make_arms(
    specs: Sequence[str | Rule], num_draft_tokens: Sequence[NumDraftTokens], *, target: str | None = None
) -> list[Arm]:
    """Return the arms of a run: target-only, draft-only and lossless first, then the requested ones, at every K.

    A list of values, as in `margin:delta=1,2,3`, makes one arm per value. A specification may end in `@K=8` or
    `@K=auto`, in `@drafter=eagle3:top_k=4`, or in both, to set the arm's own K or drafter. `lossless_rerun` is lossless
    with another seed. `direct:RULE` samples from the target, truncated to the tokens that RULE would accept.
    `lossless@K=8` replaces the default lossless arm. `certified:FILE` uses the rule, threshold and K of a certificate.
    `vllm:block`, `vllm:synthetic,acceptance_length=3` and `vllm:fly` are vLLM's own methods, on `--engine vllm`.

    Args:
        target: name of the pair's target, whose bundled heads are used if a rule names none.

    Raises:
        SpecError: a specification that cannot be read, or no K.
    """
    if not num_draft_tokens:
        raise SpecError("num_draft_tokens must name at least one K, got none")
    ks = list(dict.fromkeys(num_draft_tokens))
    specs = [one for spec in specs for one in (expand_values(spec) if isinstance(spec, str) else [spec])]
    arms = [Arm(TARGET_ONLY, None, ks[0]), Arm(DRAFT_ONLY, None, ks[0])]
    tuned = any(isinstance(spec, str) and spec.startswith(f"{LOSSLESS}@K=") for spec in specs)
    for k in ks:
        for spec in specs if tuned else (LOSSLESS, *specs):
            if spec not in (TARGET_ONLY, DRAFT_ONLY):
                arms.append(make_arm(spec, k, suffixed=len(ks) > 1, target=target))
    for k in ks:
        if length_head_path(k) and not any(arm.rule and arm.num_draft_tokens == k for arm in arms):
            raise SpecError(f"num_draft_tokens {k}: the head serves none of the arms, at these thresholds")
    return list({arm.label: arm for arm in arms}.values())


def expand_values(spec: str) -> list[str]:
    """Return the arms that a specification with lists of values stands for: `top_k:k=2,4` for `top_k:k=2`, `top_k:k=4`.

    A part without `=` is one more value of the parameter before it. Combined rules take no lists.
    """
    rule = rule_of(spec)
    name, colon, rest = rule.partition(":")
    if not colon or name in _PREFIXES or any(sign in rule for sign in "|&"):
        return [spec]
    values: list[tuple[str, list[str]]] = []
    for part in split(rest, ","):
        key, equals, value = part.partition("=")
        if equals or not values:
            values.append((key + equals, [value] if equals else [""]))
        else:
            values[-1][1].append(key)
    suffix = spec.removeprefix(rule)
    combinations = itertools.product(*([key + value for value in options] for key, options in values))
    return [f"{name}:{','.join(parts)}{suffix}" for parts in combinations]


def make_arm(spec: str | Rule, k: NumDraftTokens, *, suffixed: bool = False, target: str | None = None) -> Arm:
    """Return one arm; see `make_arms` for `spec` and `target`.

    Args:
        k: used unless the specification sets its own.
        suffixed: whether the label includes K.

    Raises:
        SpecError: a specification that cannot be read.
    """
    name, own = (spec.spec, dict[str, str]()) if isinstance(spec, Rule) else _own_settings(spec)
    own_k, drafter = own.get("K"), own.get("drafter")
    if own and name.startswith((DIRECT, CERTIFIED)):
        raise SpecError(f"{name.partition(':')[0]}: arms have no K and no drafter to set, got {spec!r}")
    if name.startswith(DIRECT):
        truncation = parse_rule(name.removeprefix(DIRECT))
        if not truncation.truncates:
            raise SpecError(
                f"direct: takes a rule that judges by the target's distribution alone, got {truncation.name}"
            )
        return Arm(DIRECT + truncation.spec, None, k, truncation=truncation)
    if name.startswith(CERTIFIED):
        certificate = Certificate.load(name.removeprefix(CERTIFIED))
        rule = attach_heads(parse_rule(certificate.rule), target)
        certified = certificate.conditions.num_draft_tokens
        length = draft_tokens_for(k, rule) if isinstance(k, str) else AUTO
        k = certified if isinstance(certified, int) else length
        return Arm(rule.spec, rule, k, certificate=certificate)
    rerun, method = name == RERUN, _vllm_method(name) if name.startswith(VLLM) else ()
    rule = spec if isinstance(spec, Rule) else parse_rule(LOSSLESS if rerun or method else name)
    rule = attach_heads(rule, target)
    k = draft_tokens_for(k, rule) if own_k is None else _own_k(own_k, spec)
    return Arm(
        name if rerun or method else rule.spec,
        rule,
        k,
        names_k=suffixed or own_k is not None or bool(length_head_path(k)),
        seed_shift=_RERUN_SEED if rerun else 0,
        drafter=drafter,
        vllm=method,
    )


def _vllm_method(name: str) -> tuple[tuple[str, Any], ...]:
    """vLLM's speculative configuration for `vllm:METHOD,parameter=value`; parameters bear the method's name."""
    method, *given = split(name.removeprefix(VLLM), ",")
    require_choice("vllm", method, VLLM_METHODS)
    parameters = parse_parameters(",".join(given), where=f"arm {VLLM}{method}")
    settings = {f"{method}_{key}": _json_value(text) for key, text in parameters.items()}
    return (("rejection_sample_method", method), *settings.items())


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _own_k(text: str, spec: str | Rule) -> NumDraftTokens:
    k = read_draft_tokens(text)
    try:
        require_draft_tokens(k)
    except SpecError:
        raise SpecError(
            f"an arm's own K is written @K=8 (1 to 512), @K=auto or @K=auto:path=FOLDER, got {spec!r}"
        ) from None
    return k


def _own_settings(spec: str) -> tuple[str, dict[str, str]]:
    """Split an arm into its rule and its `@K=` and `@drafter=` settings."""
    name, *parts = _OWN.split(spec)
    own = dict(part.split("=", 1) for part in parts)
    if len(own) != len(parts) or not all(own.values()):
        raise SpecError(f"an arm names its own K and drafter once each, as {name}@K=8@drafter=eagle3, got {spec!r}")
    if "drafter" in own:
        DRAFTERS.make(own["drafter"])
    return name, own
