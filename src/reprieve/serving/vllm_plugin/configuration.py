"""Where the plugin's configuration comes from, and what a vLLM set-up must offer a rule."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from reprieve.errors import PairError, ReprieveError, SpecError, require_choice
from reprieve.heads.binding import tokenizer_fingerprint
from reprieve.heads.folds import FoldedHead
from reprieve.needs import Need
from reprieve.rules import LosslessRule, Rule
from reprieve.serving.policy import Policy

VARIABLE = "REPRIEVE_VLLM"
KEY = "reprieve"
TESTED_VERSIONS = ("0.32",)
ANY_VERSION = "REPRIEVE_VLLM_ANY_VERSION"


def source_of(additional_config: Any) -> Any:
    """What `--additional-config` says, else the environment variable; None where the plugin is off."""
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        given = additional_config[KEY]
        return None if given is False else given
    return os.environ.get(VARIABLE) or None


def load_policy(source: Any, target: str) -> Policy:
    """The policy, read once a process.

    Args:
        target: name or folder of the model that is served.

    Raises:
        ReprieveError: see `Policy.load`.
    """
    try:
        return _load(json.dumps(source, sort_keys=True), target)
    except TypeError:
        raise SpecError(f"the configuration must be what JSON can hold, got {source!r}") from None


@lru_cache
def _load(source: str, target: str) -> Policy:
    return Policy.load(json.loads(source), target=target)


def require_version(version: str) -> None:
    """Refuse a vLLM that this was not tested with.

    Raises:
        ReprieveError: says which versions were, and the way out.
    """
    if os.environ.get(ANY_VERSION) == "1" or ".".join(version.split(".")[:2]) in TESTED_VERSIONS:
        return
    raise ReprieveError(
        f"Reprieve's plugin was tested with vLLM {', '.join(TESTED_VERSIONS)}, this is {version}: install a tested "
        f"version, switch the plugin off (unset {VARIABLE}, or VLLM_PLUGINS=''), or set {ANY_VERSION}=1 and compare "
        "its answers with the local engine's before you serve"
    )


@dataclass(frozen=True)
class Setup:
    """The part of a vLLM configuration that decides whether a rule can work."""

    version: str
    method: str | None  # of speculative decoding; None without
    rejection_sample_method: str
    has_draft_logits: bool  # whether the drafter computes a distribution that can be read
    heterogeneous_vocab: bool
    v2_model_runner: bool
    async_scheduling: bool
    hidden_size: int

    def require(self, policy: Policy) -> None:
        """Refuse what would fail, or would silently serve losslessly.

        Raises:
            ReprieveError: says what is missing and the way out.
        """
        require_version(self.version)
        rule = policy.rule
        if self.v2_model_runner:
            raise ReprieveError("the V2 model runner has no hooks for rules yet: set VLLM_USE_V2_MODEL_RUNNER=0")
        if self.method is None:
            raise ReprieveError(f"rule {rule.spec} needs speculative decoding: give vLLM a --speculative-config")
        require_choice("rejection_sample_method", self.rejection_sample_method, ("standard",))
        if isinstance(rule, LosslessRule) and rule.verification != "token":
            raise SpecError(f"vLLM has its own lossless check: rule lossless takes no verification, got {rule.spec}")
        self._require_inputs(policy)

    def _require_inputs(self, policy: Policy) -> None:
        rule = policy.rule
        needs = rule.traits.needs
        for need, words in ((Need.DRAFT_HIDDEN, "the draft's hidden states"), (Need.ADVICE, "an advisor")):
            if need in needs:
                raise SpecError(f"rule {rule.spec} needs {words}, which vLLM does not hand out; use the local engine")
        if other := set(rule.traits.target_layers) - {-1}:
            raise SpecError(f"rule {rule.spec} reads layer {min(other)}; vLLM hands out the last one (-1) only")
        if Need.DRAFT_PROBS in needs and not self.has_draft_logits:
            raise SpecError(f"rule {rule.spec} needs draft probabilities, which method {self.method!r} does not have")
        if Need.DRAFT_PROBS in needs and self.heterogeneous_vocab:
            raise SpecError(
                f"rule {rule.spec} needs draft probabilities over the target's vocabulary: unset "
                "use_heterogeneous_vocab"
            )
        if Need.CONTEXT in needs and self.async_scheduling:
            raise SpecError(
                f"rule {rule.spec} reads the text, which asynchronous scheduling has not got in time: start "
                "vLLM with --no-async-scheduling"
            )
        for name, head in rule.heads:
            if isinstance(head, FoldedHead):
                raise SpecError(f"head {name!r} is out-of-fold: serve one head, not its folds")
            wanted = head.features_of(self.hidden_size)
            if head.num_features != wanted:
                raise SpecError(
                    f"head {name!r} reads {head.num_features} features, this target gives {wanted}: it was made for "
                    f"{head.pair.target!r}"
                )


def require_tokenizer(rule: Rule, tokenizer: Any) -> None:
    """Refuse heads made for another tokenizer. Weights cannot be compared: vLLM keeps them in a layout of its own.

    Raises:
        PairError: names the head and whom it was made for.
    """
    fingerprint = tokenizer_fingerprint(tokenizer.get_vocab())
    for name, head in rule.heads:
        if head.pair.tokenizer != fingerprint:
            raise PairError(
                f"head {name!r} was made for target {head.pair.target!r}, whose tokenizer is another one "
                f"({head.pair.tokenizer} and {fingerprint})"
            )
