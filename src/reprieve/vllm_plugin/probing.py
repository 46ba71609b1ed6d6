"""All parts of vLLM that the plugin touches, a check that they exist, and a self-test in a worker at startup.

New optional parameters are allowed. In the self-test, two synthetic requests with one drafted token each go through the
installed hooks and vLLM's own sampler. The rule accepts every token; the target prefers another one. The token must be
emitted, and a request with the rule off must be unchanged.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reprieve.errors import ReprieveError, SpecError
from reprieve.policies.menu import Menu
from reprieve.policies.policy import SWITCH, Policy
from reprieve.rules import parse_rule
from reprieve.types import Need
from reprieve.vllm_plugin.rounds import WorkerRules

OWN, DRAFTED = 1, 2  # in the self-test: the target's token, and the drafter's
ASKED: tuple[dict[str, str], ...] = ({}, {SWITCH: "off"})
WRAPPED, ADDED, USED = "wrapped", "added", "used"


@dataclass(frozen=True)
class Part:
    """A part of vLLM that the plugin touches.

    Args:
        module, name: its definition; a method as Class.method.
        needed: parameters it must have, in this order, before all others; separated by spaces.
        use: `wrapped`, `added` to a class, or `used` as it is: called, or overridden by a class of ours.
        called: the plugin passes the arguments itself, so no other parameter may be required.
        where: the module in which it is wrapped, if not the one that defines it.
        optional: the plugin works without it, or finds it on an object regardless of the class that defines it.
    """

    module: str
    name: str
    needed: str = ""
    use: str = WRAPPED
    called: bool = False
    where: str = ""
    optional: bool = False

    @property
    def path(self) -> str:
        """The attribute that a wrapper is set on."""
        return f"{self.where or self.module}.{self.name}"


# On both runners: start and admission, then numbers on their way to responses and the metrics page.
_BOTH = (
    Part("vllm.v1.engine.input_processor", "InputProcessor.__init__", "self vllm_config"),
    Part("vllm.v1.engine.input_processor", "InputProcessor._validate_params", "self params"),
    Part("vllm.v1.engine.core", "EngineCore._initialize_kv_caches", "self vllm_config"),
    Part("vllm.v1.engine.core", "EngineCore.collective_rpc", "self method", USED),
    Part("vllm.v1.engine.async_llm", "AsyncLLM.check_health", "self"),
    Part("vllm.entrypoints.serve.engine.serving", "BaseServing._check_model", "self request", optional=True),
    Part("vllm.v1.worker.worker_base", "WorkerBase.reprieve_status", use=ADDED),
    Part("vllm.v1.worker.worker_base", "WorkerBase.reprieve_install", use=ADDED),
    Part(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        "self scheduler_output model_runner_output",
        called=True,
    ),
    Part("vllm.v1.spec_decode.metrics", "SpecDecodingStats.reprieve", use=ADDED),
    Part("vllm.v1.spec_decode.metrics", "SpecDecodingProm.__init__", "self speculative_config labelnames"),
    Part("vllm.v1.spec_decode.metrics", "SpecDecodingProm.observe", "self spec_decoding_stats", called=True),
    Part("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics.reprieve", use=ADDED),
    Part("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics.to_dict", "self", called=True),
)
# The modules of the model runners that the plugin knows, newest first; V1's entries go with `v1.py`.
RUNNERS = {"v2": "vllm.v1.worker.gpu.model_runner", "v1": "vllm.v1.worker.gpu_model_runner"}
_V2, _V1_SAMPLER = "vllm.v1.worker.gpu", "vllm.v1.sample.rejection_sampler"
PARTS: dict[str, tuple[Part, ...]] = {
    "v2": (
        *_BOTH,
        Part(
            f"{_V2}.spec_decode.rejection_sampler_utils",
            "rejection_sample",
            "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping expanded_idx_mapping "
            "expanded_local_pos temperature seed num_speculative_steps",
            called=True,
            where=f"{_V2}.spec_decode.rejection_sampler",
        ),
        Part(
            f"{_V2}.sample.sampler",
            "Sampler.apply_sampling_params",
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
            "seq_lens_upper_bound_np",
            called=True,
        ),
        Part(
            f"{_V2}.sample.logits_processor.interface",
            "LogitsProcessor.add_request",
            "self req_idx sampling_params",
            USED,
        ),
        Part(f"{_V2}.sample.logits_processor.interface", "LogitsProcessor.apply", "self logits ctx", USED),
        Part(f"{_V2}.sample.gumbel", "tl_rand32", "seed offset includes_zero", USED, called=True),
        Part(RUNNERS["v2"], "GPUModelRunner.sample_tokens", "self grammar_output"),
        Part(RUNNERS["v2"], "GPUModelRunner.finish_requests", "self scheduler_output"),
        Part(f"{_V2}.async_utils", "AsyncOutput.get_output", "self", optional=True),
    ),
    "v1": (
        *_BOTH,
        Part(
            _V1_SAMPLER,
            "rejection_sample",
            "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
            "bonus_token_ids sampling_metadata",
            called=True,
        ),
        Part(_V1_SAMPLER, "apply_sampling_constraints", "logits cu_num_draft_tokens sampling_metadata"),
        Part(_V1_SAMPLER, "generate_uniform_probs", "num_tokens num_draft_tokens generators device", called=True),
        Part(RUNNERS["v1"], "GPUModelRunner.sample_tokens", "self grammar_output"),
        Part(RUNNERS["v1"], "GPUModelRunner.propose_draft_token_ids", "self"),
        Part(RUNNERS["v1"], "GPUModelRunner._copy_draft_token_ids_to_cpu", "self scheduler_output zeros_only"),
        Part(
            "vllm.v1.spec_decode.llm_base_proposer",
            "SpecDecodeBaseProposer._sample_draft_tokens",
            "self hidden_states sampling_metadata",
            called=True,
            optional=True,
        ),
    ),
}


def runner_kind(runner: Any) -> str:
    """Return `v1` or `v2` for a model runner.

    Raises:
        ReprieveError: the runner is of neither kind.
    """
    modules = {kind.__module__ for kind in type(runner).__mro__}
    for kind, module in RUNNERS.items():
        if module in modules:
            return kind
    known = " and ".join(kind.upper() for kind in reversed(RUNNERS))
    raise ReprieveError(f"Reprieve's plugin knows vLLM's {known} model runners, this is {type(runner).__name__}")


def require_parts(parts: Sequence[Part], parameters_of: Callable[[Part], Mapping[str, bool] | None]) -> None:
    """Refuse a vLLM that lacks a part, or in which one takes other parameters.

    Args:
        parameters_of: returns whether each parameter of a part is required; None where the part is not there.

    Raises:
        ReprieveError: names the part, what it takes and what it must take.
    """
    for part in parts:
        if part.use == ADDED:
            continue
        given = parameters_of(part)
        where = f"vLLM's {part.module}.{part.name}"
        if given is None:
            if part.optional:
                continue
            raise ReprieveError(f"{where} is not there: this vLLM does not fit Reprieve's plugin")
        needed = part.needed.split()
        names = list(given)
        unknown = [name for name in names[len(needed) :] if given[name]]
        if names[: len(needed)] != needed or (part.called and unknown):
            raise ReprieveError(
                f"{where} takes ({', '.join(names)}), the plugin needs ({', '.join(needed)})"
                f"{' alone' if part.called else ' first'}: this vLLM does not fit Reprieve's plugin"
            )


def live(part: Part) -> dict[str, bool] | None:
    """Return whether each parameter of a part of the installed vLLM is required; None where it is not there."""
    try:
        function: Any = importlib.import_module(part.module)
        for name in part.name.split("."):
            function = getattr(function, name)
    except (ImportError, AttributeError):
        return None
    function = inspect.unwrap(getattr(function, "fn", function))  # a Triton kernel holds its function
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: item.default is inspect.Parameter.empty
        for name, item in inspect.signature(function).parameters.items()
        if item.kind not in free
    }


def run_selftest(hooks: Any) -> None:
    """Run the self-test on a runner's hooks.

    Raises:
        ReprieveError: the hooks do not work with this vLLM.
    """
    rules, size = hooks.rules, int(hooks.runner.model_config.get_vocab_size())
    hooks.rules = WorkerRules(Menu([Policy(parse_rule(f"top_k:k={size}"))]), rank=rules.rank)
    try:
        for relaxed, untouched in hooks.try_out(size):
            if hooks.rules.failures:
                raise ReprieveError("the rule raised an error, see the log")
            if relaxed != DRAFTED:
                raise ReprieveError(f"a drafted token that the rule accepts was rejected (got {relaxed})")
            if untouched != OWN:
                raise ReprieveError(f"a request with the rule switched off was changed (got {untouched})")
    except ReprieveError as error:
        raise ReprieveError(f"Reprieve's self-test failed in worker {rules.rank}: {error}") from None
    except Exception as error:  # another vLLM may fail in any way
        raise ReprieveError(f"Reprieve's self-test failed in worker {rules.rank}: {error!r}") from error
    finally:
        hooks.rules = rules


def require_last_states(runner: Any, menu: Menu) -> None:
    """Refuse heads if the model returns hidden states from before its final norm: heads were trained on normed states.

    Some models in vLLM (MiMo) apply the final norm in `compute_logits`. Doubling a state then leaves the logits
    unchanged.

    Raises:
        SpecError: names the model.
    """
    if not {Need.NODE_HIDDEN, Need.PARENT_HIDDEN} & menu.needs:
        return
    model, config = runner.get_model(), runner.model_config
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(1, config.get_hidden_size(), generator=draw).to(runner.device, config.dtype)
    once, twice = model.compute_logits(states), model.compute_logits(2 * states)
    if once is not None and torch.allclose(once.float(), twice.float(), rtol=0.02, atol=1e-3):
        raise SpecError(
            f"{type(model).__name__} hands out its hidden states before the last norm, and heads read those behind it: "
            "serve a rule without heads"
        )


def certain_logits(num_rows: int, size: int, device: torch.device) -> Tensor:
    logits = torch.zeros(num_rows, size, device=device)
    logits[:, OWN] = 30.0  # certain, sampled or not
    return logits
