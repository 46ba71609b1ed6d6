"""All parts of vLLM that the plugin touches, and whether a vLLM has them: further optional parameters are let be."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError

WRAPPED, ADDED, OVERRIDDEN, CALLED = "wrapped", "added", "overridden", "called"


@dataclass(frozen=True)
class Part:
    """A part of vLLM that the plugin touches.

    Args:
        module, name: its definition; a method as Class.method.
        needed: parameters it must have, in this order, before all others.
        use: `wrapped`, `overridden` by a class of ours, `called` without a wrapper, or `added` to a class.
        called: whether the plugin passes the arguments itself: then nothing else may have to be given.
        where: the module in which it is wrapped, where that is not the one that defines it.
        optional: the plugin does without it, and says what is missing then.
    """

    module: str
    name: str
    needed: tuple[str, ...]
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


def _part(module: str, name: str, needed: str, use: str = WRAPPED, **more: Any) -> Part:
    return Part(module, name, tuple(needed.split()), use, **{"called": use == CALLED, **more})


_V1_SAMPLER = "vllm.v1.sample.rejection_sampler"
_V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu"
# On both runners: start and admission, then numbers on their way to responses and the metrics page.
_FRONT = (
    _part("vllm.v1.engine.input_processor", "InputProcessor.__init__", "self vllm_config"),
    _part("vllm.v1.engine.input_processor", "InputProcessor._validate_params", "self params"),
    _part("vllm.v1.engine.core", "EngineCore._initialize_kv_caches", "self vllm_config"),
    _part("vllm.v1.engine.core", "EngineCore.collective_rpc", "self method", CALLED, called=False),
    _part("vllm.v1.engine.async_llm", "AsyncLLM.check_health", "self"),
    _part("vllm.entrypoints.serve.engine.serving", "BaseServing._check_model", "self request", optional=True),
    _part("vllm.v1.worker.worker_base", "WorkerBase.reprieve_status", "", ADDED),
    _part("vllm.v1.worker.worker_base", "WorkerBase.reprieve_install", "", ADDED),
    _part(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        "self scheduler_output model_runner_output",
        called=True,
    ),
    _part("vllm.v1.spec_decode.metrics", "SpecDecodingStats.reprieve", "", ADDED),
    _part("vllm.v1.spec_decode.metrics", "SpecDecodingProm.__init__", "self speculative_config labelnames"),
    _part("vllm.v1.spec_decode.metrics", "SpecDecodingProm.observe", "self spec_decoding_stats", called=True),
    _part("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics.reprieve", "", ADDED),
    _part("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics.to_dict", "self", called=True),
)
PARTS: dict[str, tuple[Part, ...]] = {
    "v1": (
        *_FRONT,
        _part(
            _V1_SAMPLER,
            "rejection_sample",
            "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
            "bonus_token_ids sampling_metadata",
            called=True,
        ),
        _part(_V1_SAMPLER, "apply_sampling_constraints", "logits cu_num_draft_tokens sampling_metadata"),
        _part(_V1_SAMPLER, "generate_uniform_probs", "num_tokens num_draft_tokens generators device", called=True),
        _part(_V1_RUNNER, "GPUModelRunner.sample_tokens", "self grammar_output"),
        _part(_V1_RUNNER, "GPUModelRunner.propose_draft_token_ids", "self"),
        _part(_V1_RUNNER, "GPUModelRunner._copy_draft_token_ids_to_cpu", "self scheduler_output zeros_only"),
        _part(
            "vllm.v1.spec_decode.llm_base_proposer",
            "SpecDecodeBaseProposer._sample_draft_tokens",
            "self hidden_states sampling_metadata",
            called=True,
        ),
    ),
    "v2": (
        *_FRONT,
        _part(
            f"{_V2}.spec_decode.rejection_sampler_utils",
            "rejection_sample",
            "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping expanded_idx_mapping "
            "expanded_local_pos temperature seed num_speculative_steps",
            called=True,
            where=f"{_V2}.spec_decode.rejection_sampler",
        ),
        _part(
            f"{_V2}.sample.sampler",
            "Sampler.apply_sampling_params",
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
            "seq_lens_upper_bound_np",
            called=True,
        ),
        _part(
            f"{_V2}.sample.logits_processor.interface",
            "LogitsProcessor.add_request",
            "self req_idx sampling_params",
            OVERRIDDEN,
        ),
        _part(f"{_V2}.sample.logits_processor.interface", "LogitsProcessor.apply", "self logits ctx", OVERRIDDEN),
        _part(f"{_V2}.sample.gumbel", "tl_rand32", "seed offset includes_zero", CALLED),
        _part(f"{_V2}.model_runner", "GPUModelRunner.sample_tokens", "self grammar_output"),
        _part(f"{_V2}.model_runner", "GPUModelRunner.finish_requests", "self scheduler_output"),
        _part(f"{_V2}.async_utils", "AsyncOutput.get_output", "self"),
    ),
}


def touched(kind: str) -> tuple[Part, ...]:
    """The parts of a runner's vLLM that are not as vLLM made them once the plugin is configured."""
    return tuple(part for part in PARTS[kind] if part.use in (WRAPPED, ADDED))


def runner_kind(runner: Any) -> str:
    """`v1` or `v2`, by what a model runner is.

    Raises:
        ReprieveError: neither.
    """
    modules = {kind.__module__ for kind in type(runner).__mro__}
    for name, module in (("v1", _V1_RUNNER), ("v2", f"{_V2}.model_runner")):
        if module in modules:
            return name
    raise ReprieveError(f"Reprieve's plugin knows vLLM's V1 and V2 model runners, this is {type(runner).__name__}")


def require_parts(kind: str, parameters_of: Callable[[Part], Sequence[Parameter] | None]) -> None:
    """Refuse a vLLM that lacks a part, or in which one takes other parameters.

    Raises:
        ReprieveError: names the part, what it takes and what it must take.
    """
    for part in PARTS[kind]:
        given = None if part.use == ADDED else parameters_of(part)
        where = f"vLLM's {part.module}.{part.name}"
        if given is None and (part.use == ADDED or part.optional):
            continue
        if given is None:
            raise ReprieveError(f"{where} is not there: this vLLM does not fit Reprieve's plugin")
        names = tuple(parameter.name for parameter in given)
        unknown = [item.name for item in given[len(part.needed) :] if item.required]
        if names[: len(part.needed)] != part.needed or (part.called and unknown):
            raise ReprieveError(
                f"{where} takes ({', '.join(names)}), the plugin needs ({', '.join(part.needed)})"
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


def in_source(root: Path) -> Callable[[Part], list[Parameter] | None]:
    """The same of a vLLM that lies unpacked in a folder and need not be importable."""

    def parameters_of(part: Part) -> list[Parameter] | None:
        path = root.joinpath(*part.module.split(".")).with_suffix(".py")
        body: Sequence[ast.AST] = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ()
        node: ast.AST | None = None
        for name in part.name.split("."):
            named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            node = next((item for item in body if isinstance(item, named) and item.name == name), None)
            body = node.body if isinstance(node, ast.ClassDef) else ()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        given = node.args
        positional = [*given.posonlyargs, *given.args]
        num_required = len(positional) - len(given.defaults)
        made = [Parameter(item.arg, place < num_required) for place, item in enumerate(positional)]
        keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        return made + [Parameter(item.arg, default is None) for item, default in keywords]

    return parameters_of
