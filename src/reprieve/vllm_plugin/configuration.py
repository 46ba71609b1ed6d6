"""Sources of the plugin's configuration, and requirements of the rules on a vLLM set-up."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from reprieve.backends.servers import require_vllm_inputs
from reprieve.errors import PairError, ReprieveError, SpecError, require_choice
from reprieve.identity import tokenizer_fingerprint
from reprieve.policies.menu import STRICT_ONLY, Menu
from reprieve.policies.policy import STRICT_STRUCTURED
from reprieve.rules import Rule
from reprieve.types import Need

KEY = "reprieve"  # of vLLM's additional configuration
VARIABLE = "REPRIEVE_VLLM"
# Keys of a policy and parameters of its rule that restrict it. Ignoring a misplaced one would make a server lenient.
_INSIDE = (STRICT_ONLY, STRICT_STRUCTURED, "span", "outside", "strict_first")
# A row for each version and model runner that the tests were run on; they write it themselves (tests/vllm/tested.py).
# Other versions are warned about, and judged by their parts (see `probing`).
TESTED = Path(__file__).with_name("tested.json")


def source_of(additional_config: Any) -> Any:
    """Return the value from `--additional-config`, else from the environment variable; None if the plugin is off.

    Raises:
        SpecError: a key that looks like a misspelt or misplaced one of ours; ignoring it could make a server lenient.
    """
    config = additional_config if isinstance(additional_config, Mapping) else {}
    given = config.get(KEY) if KEY in config else os.environ.get(VARIABLE) or None
    if given is None or given is False:
        if KEY not in config and (near := difflib.get_close_matches(KEY, map(str, config), n=1, cutoff=0.8)):
            raise SpecError(f"additional_config: {near[0]!r} is not known, did you mean {KEY!r}?")
        return None
    for name in config.keys() - {KEY}:
        if near := difflib.get_close_matches(str(name), _INSIDE, n=1, cutoff=0.75):
            raise SpecError(f"additional_config: {name!r} does nothing here: {near[0]} must be given inside {KEY}")
    return given


def load_menu(source: Any, target: str, **conditions: Any) -> Menu:
    """Load the operator's rules; the result is cached per process.

    Args:
        target: name or folder of the model that is served.
        conditions: conditions that hold on this server (`Policy.for_conditions`).

    Raises:
        ReprieveError: see `Menu.load`.
    """
    try:
        text = json.dumps(source, sort_keys=True)
    except TypeError:
        raise SpecError(f"the configuration must be JSON serializable, got {source!r}") from None
    return _load(text, target, **conditions)


@lru_cache
def _load(source: str, target: str, **conditions: Any) -> Menu:
    return Menu.load(json.loads(source), target=target).map_policies(lambda policy: policy.for_conditions(**conditions))


@lru_cache
def load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """Load the model's tokenizer with transformers, once per process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def require_markers(menu: Menu, target: str, tokenizer: Callable[[], Any]) -> None:
    """Refuse spans whose markers the model does not have, before any worker starts.

    Raises:
        SpecError: names the model and the span.
    """
    for rule in menu.rules:
        if Need.CONTEXT in rule.traits.needs:
            try:
                rule.bind(tokenizer())
            except SpecError as error:
                raise SpecError(f"model {target!r}: {error}") from None


def version_warning(version: str, runner: str) -> str:
    """Return a warning about a vLLM version that was not tested with this plugin; empty for tested ones."""
    rows = [(row["vllm"], row["runner"]) for row in json.loads(TESTED.read_text(encoding="utf-8"))]
    minor = version.split(".")[:2]
    if any(tested.split(".")[:2] == minor and runner == kind for tested, kind in rows):
        return ""
    tested = ", ".join(f"{name} ({kind})" for name, kind in rows)
    return (
        f"Reprieve has not been tested on vLLM {version} with {runner}, only on {tested}: checks at startup decide "
        "whether it works; compare some answers with the local engine's before you serve"
    )


def runner_of(vllm_config: Any) -> str:
    """Return the model runner of a vLLM configuration: v1 or v2."""
    return "v2" if vllm_config.use_v2_model_runner else "v1"


def require_supported(vllm_config: Any, menu: Menu) -> None:
    """Refuse a vLLM configuration that would fail with the rules, or silently decode losslessly.

    Raises:
        ReprieveError: names the setting and how to change it.
    """
    spec, model = vllm_config.speculative_config, vllm_config.model_config
    if spec is None:
        raise ReprieveError("rules need speculative decoding: give vLLM a --speculative-config")
    require_choice("rejection_sample_method", spec.rejection_sample_method, ("standard",))
    if runner_of(vllm_config) == "v2" and str(model.logprobs_mode).startswith("processed"):
        raise ReprieveError(
            "on the V2 model runner rules change the logits that processed log-probabilities are read from: set "
            "--logprobs-mode raw_logprobs"
        )
    if getattr(model, "return_sampling_mask", False):  # hands out the support of each draw
        raise ReprieveError("return_sampling_mask would expose the rules' edits to the logits: turn it off")
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        raise ReprieveError(
            "with batch-sharded sampling ranks sample different requests, which rules cannot follow: start vLLM "
            "with --no-enable-batch-sharded-sampling"
        )
    if getattr(spec, "enable_adaptive_verification", False):  # cuts blocks before they are verified
        raise ReprieveError(
            "adaptive verification shortens blocks without informing the rules: set in --speculative-config "
            '"enable_adaptive_verification": false'
        )
    for rule in menu.rules:
        require_vllm_inputs(rule)
        _require_inputs(rule, vllm_config)


def _require_inputs(rule: Rule, vllm_config: Any) -> None:
    """Refuse a rule with inputs that this configuration does not provide."""
    spec, runner, needs = vllm_config.speculative_config, runner_of(vllm_config), rule.traits.needs
    if Need.DRAFT_PROBS in needs:
        could = "ngram" not in str(spec.method)
        keeps = could and spec.draft_sample_method == "probabilistic"
        if runner == "v1":
            keeps = spec.method in ("draft_model", "eagle", "eagle3", "mtp")
            if getattr(spec, "parallel_drafting", False):  # all distributions of a block come at once
                raise SpecError(
                    f"rule {rule.spec} needs draft probabilities, which the V1 model runner does not give one by one "
                    "with parallel_drafting: unset it, or use the V2 model runner"
                )
        if not keeps:
            add = ' (on the V2 model runner: add "draft_sample_method": "probabilistic")'
            raise SpecError(
                f"rule {rule.spec} needs draft probabilities, which method {spec.method!r} does not keep"
                f"{add if runner == 'v2' and could else ''}"
            )
        if spec.use_heterogeneous_vocab:
            raise SpecError(
                f"rule {rule.spec} needs draft probabilities over the target's vocabulary: unset "
                "use_heterogeneous_vocab"
            )
    reads_text = bool({Need.CONTEXT, Need.ANSWER_POSITIONS} & needs)
    if reads_text and runner == "v1" and vllm_config.scheduler_config.async_scheduling:
        raise SpecError(
            f"rule {rule.spec} reads the text or its length, which the V1 model runner does not have in time under "
            "asynchronous scheduling: start vLLM with --no-async-scheduling"
        )
    for name, head in rule.heads:
        wanted = head.features_of(vllm_config.model_config.get_hidden_size())
        if head.num_features != wanted:
            raise SpecError(
                f"head {name!r} reads {head.num_features} features, this target gives {wanted}: it was made for "
                f"{head.pair.target!r}"
            )


def require_tokenizer(rule: Rule, tokenizer: Any) -> None:
    """Refuse heads made for another tokenizer. Weights cannot be compared, because vLLM changes their layout.

    Raises:
        PairError: names the head and the target that it was made for.
    """
    fingerprint = tokenizer_fingerprint(tokenizer.get_vocab())
    for name, head in rule.heads:
        if head.pair.tokenizer != fingerprint:
            raise PairError(
                f"head {name!r} was made for target {head.pair.target!r}, whose tokenizer is another one "
                f"({head.pair.tokenizer} and {fingerprint})"
            )
