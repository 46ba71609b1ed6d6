"""All parts of vLLM that the plugin touches, and a check that they exist; new optional parameters are allowed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        called: the plugin passes the arguments itself, so no other parameter may be required.
        where: the module in which it is wrapped, if not the one that defines it.
        optional: the plugin works without it, or finds it on an object regardless of the class that defines it.
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


def part_of(module: str, name: str, needed: str, use: str = WRAPPED, **more: Any) -> Part:
    return Part(module, name, tuple(needed.split()), use, **{"called": use == CALLED, **more})


# On both runners: start and admission, then numbers on their way to responses and the metrics page.
FRONT = (
    part_of("vllm.v1.engine.input_processor", "InputProcessor.__init__", "self vllm_config"),
    part_of("vllm.v1.engine.input_processor", "InputProcessor._validate_params", "self params"),
    part_of("vllm.v1.engine.core", "EngineCore._initialize_kv_caches", "self vllm_config"),
    part_of("vllm.v1.engine.core", "EngineCore.collective_rpc", "self method", CALLED, called=False),
    part_of("vllm.v1.engine.async_llm", "AsyncLLM.check_health", "self"),
    part_of("vllm.entrypoints.serve.engine.serving", "BaseServing._check_model", "self request", optional=True),
    part_of("vllm.v1.worker.worker_base", "WorkerBase.reprieve_status", "", ADDED),
    part_of("vllm.v1.worker.worker_base", "WorkerBase.reprieve_install", "", ADDED),
    part_of(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        "self scheduler_output model_runner_output",
        called=True,
    ),
    part_of("vllm.v1.spec_decode.metrics", "SpecDecodingStats.reprieve", "", ADDED),
    part_of("vllm.v1.spec_decode.metrics", "SpecDecodingProm.__init__", "self speculative_config labelnames"),
    part_of("vllm.v1.spec_decode.metrics", "SpecDecodingProm.observe", "self spec_decoding_stats", called=True),
    part_of("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics.reprieve", "", ADDED),
    part_of("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics.to_dict", "self", called=True),
)
RUNNERS = ("v2", "v1")  # the folders that may be there, newest first


def runners() -> list[str]:
    """The model runners that the plugin knows."""
    return [kind for kind in RUNNERS if importlib.util.find_spec(f"reprieve.vllm_plugin.{kind}") is not None]


def parts(kind: str) -> tuple[Part, ...]:
    """All parts that are touched with a model runner."""
    own: tuple[Part, ...] = _folder(kind).PARTS
    return (*FRONT, *own)


def _folder(kind: str) -> Any:
    return importlib.import_module(f"reprieve.vllm_plugin.{kind}.parts")


def touched(kind: str) -> tuple[Part, ...]:
    """Return the parts of vLLM that a configured plugin changes, with a model runner of this kind."""
    return tuple(part for part in parts(kind) if part.use in (WRAPPED, ADDED))


def runner_kind(runner: Any) -> str:
    """Return `v1` or `v2` for a model runner.

    Raises:
        ReprieveError: the runner is of neither kind.
    """
    modules = {kind.__module__ for kind in type(runner).__mro__}
    for kind in runners():
        if _folder(kind).RUNNER in modules:
            return kind
    known = " and ".join(kind.upper() for kind in reversed(runners()))
    raise ReprieveError(f"Reprieve's plugin knows vLLM's {known} model runners, this is {type(runner).__name__}")


def require_parts(kind: str, parameters_of: Callable[[Part], Sequence[Parameter] | None]) -> None:
    """Refuse a vLLM that lacks a part, or in which one takes other parameters.

    Raises:
        ReprieveError: names the part, what it takes and what it must take.
    """
    for part in parts(kind):
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
