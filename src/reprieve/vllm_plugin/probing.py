"""All parts of vLLM that the plugin touches, and a check that they exist; new optional parameters are allowed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.errors import ReprieveError

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


@dataclass(frozen=True)
class Parameter:
    """A parameter, as source or a live function has it."""

    name: str
    required: bool


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
# The modules of the model runners that the plugin knows, newest first; V1's entries go with its folder.
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


def require_parts(parts: Sequence[Part], parameters_of: Callable[[Part], Sequence[Parameter] | None]) -> None:
    """Refuse a vLLM that lacks a part, or in which one takes other parameters.

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
        names = [parameter.name for parameter in given]
        unknown = [item.name for item in given[len(needed) :] if item.required]
        if names[: len(needed)] != needed or (part.called and unknown):
            raise ReprieveError(
                f"{where} takes ({', '.join(names)}), the plugin needs ({', '.join(needed)})"
                f"{' alone' if part.called else ' first'}: this vLLM does not fit Reprieve's plugin"
            )


def live(part: Part) -> list[Parameter] | None:
    """The parameters of a part of the vLLM that is installed; None where it is not there."""
    try:
        function: Any = importlib.import_module(part.module)
        for name in part.name.split("."):
            function = getattr(function, name)
    except (ImportError, AttributeError):
        return None
    function = inspect.unwrap(getattr(function, "fn", function))  # a Triton kernel holds its function
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        Parameter(name, item.default is inspect.Parameter.empty)
        for name, item in inspect.signature(function).parameters.items()
        if item.kind not in free
    ]
