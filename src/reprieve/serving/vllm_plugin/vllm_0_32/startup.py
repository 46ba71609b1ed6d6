"""vLLM 0.32, V1 model runner: where it starts up, and where requests come in.

This folder is all that knows vLLM's internals; another version of vLLM is another folder. No kernel is replaced: see
`sampler`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from reprieve.errors import ReprieveError
from reprieve.serving.policy import PREFIX, Policy, RequestError
from reprieve.serving.vllm_plugin import configuration
from reprieve.serving.vllm_plugin.health import require_healthy
from reprieve.serving.vllm_plugin.rounds import WorkerRules
from reprieve.serving.vllm_plugin.vllm_0_32 import numbers
from reprieve.serving.vllm_plugin.vllm_0_32.runner import RunnerHooks
from reprieve.serving.vllm_plugin.vllm_0_32.sampler import SIGNATURES

logger = logging.getLogger("vllm.reprieve")


def register() -> None:
    """Wrap the places where vLLM starts up, once a process. Every wrapper asks first whether the plugin is configured.

    The worker's wrapper comes first: whatever else has moved in another vLLM, it can still refuse a configured start.
    """
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    if hasattr(WorkerBase, "reprieve_status"):
        return
    WorkerBase.reprieve_status = _status
    _after(WorkerWrapperBase, "init_device", lambda wrapper: _install(wrapper.worker))
    try:
        _wrap_front_end()
    except (ImportError, AttributeError) as error:
        logger.warning("Reprieve's plugin does not fit this vLLM and refuses to be configured: %s", error)


def _wrap_front_end() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    _before(InputProcessor, "__init__", lambda processor, vllm_config, *rest, **more: _prepare(vllm_config))
    _before(InputProcessor, "_validate_params", _validate)
    _after(EngineCore, "_initialize_kv_caches", _require_workers)
    _after_async(AsyncLLM, "check_health", _check_health)


def _policy(vllm_config: Any) -> Policy | None:
    source = configuration.source_of(vllm_config.additional_config)
    if source is None:
        return None
    from vllm.version import __version__

    configuration.require_version(__version__)  # before anything that another version may have moved
    spec = vllm_config.speculative_config
    return configuration.load_policy(source, vllm_config.model_config.model).under(
        num_draft_tokens=None if spec is None else spec.num_speculative_tokens,
        drafter=None if spec is None else {"draft_model": "draft"}.get(spec.method, spec.method),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
    )


def _prepare(vllm_config: Any) -> None:
    """In the front end, before the engine starts: refuse what cannot work, and make room for our numbers."""
    policy = _policy(vllm_config)
    if policy is None:
        return
    _setup(vllm_config).require(policy)
    numbers.extend(policy.rule.spec)


def _setup(vllm_config: Any) -> configuration.Setup:
    from vllm.version import __version__

    spec = vllm_config.speculative_config
    method = None if spec is None else spec.method
    return configuration.Setup(
        version=__version__,
        method=method,
        rejection_sample_method="standard" if spec is None else spec.rejection_sample_method,
        has_draft_logits=method in ("draft_model", "eagle", "eagle3", "mtp"),
        heterogeneous_vocab=bool(spec is not None and spec.use_heterogeneous_vocab),
        v2_model_runner=vllm_config.use_v2_model_runner,
        async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
        hidden_size=vllm_config.model_config.get_hidden_size(),
    )


def _validate(processor: Any, params: Any, *rest: Any) -> None:
    """A request's fields, in the front end: an error the client sees as 400."""
    asked = getattr(params, "extra_args", None)
    if not asked or not any(name.startswith(PREFIX) for name in asked):
        return
    policy = _policy(processor.vllm_config)
    if policy is None:
        return
    from vllm.exceptions import VLLMValidationError

    try:
        policy.resolve(asked)
    except RequestError as error:
        raise VLLMValidationError(str(error), parameter=error.parameter, value=asked.get(error.parameter)) from None


def _require_workers(engine: Any, vllm_config: Any) -> None:
    """In the engine's process, after the workers came up: a worker without the plugin must not serve."""
    policy = _policy(vllm_config)
    if policy is None:
        return
    numbers.extend(policy.rule.spec)
    try:
        statuses = engine.collective_rpc("reprieve_status")
    except Exception as error:
        raise ReprieveError(f"Reprieve's plugin is configured and did not load in a worker: {error}") from None
    require_healthy(statuses)
    logger.info("Reprieve is active in %d worker(s): %s", len(statuses), policy.describe())


async def _check_health(engine: Any) -> None:
    if _policy(engine.vllm_config) is None:
        return
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        require_healthy(await engine.collective_rpc("reprieve_status", timeout=10))
    except Exception as error:
        logger.error("unhealthy: %s", error)
        raise EngineDeadError from error


def _status(worker: Any) -> dict[str, Any]:
    hooks = getattr(worker.model_runner, "reprieve", None)
    if hooks is None:
        return {"active": False, "rank": worker.rank, "failures": 0}
    status: dict[str, Any] = hooks.rules.status
    return status


def _install(worker: Any) -> None:
    """In a worker, once its runner, sampler and drafter exist."""
    policy = _policy(worker.vllm_config)
    if policy is None:
        return
    _setup(worker.vllm_config).require(policy)
    _require_signatures()
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = worker.model_runner
    if not isinstance(runner, GPUModelRunner):
        raise ReprieveError(f"Reprieve's plugin needs the V1 model runner, got {type(runner).__name__}")
    runner.reprieve = RunnerHooks(worker_rules(policy, worker), runner)
    runner.reprieve.install()


def worker_rules(policy: Policy, worker: Any) -> WorkerRules:
    """The policy, made ready for a worker: bound to its tokenizer, its heads on its device.

    Raises:
        PairError: a head made for another tokenizer.
    """
    rule = policy.rule
    if rule.traits.reads_text or rule.heads:
        from transformers import AutoTokenizer

        model = worker.vllm_config.model_config
        tokenizer: Any = AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=model.trust_remote_code)
        configuration.require_tokenizer(rule, tokenizer)
        rule = rule.bind(tokenizer)
    return WorkerRules(policy.with_rule(rule.to(worker.model_runner.device)), rank=worker.rank)


def _require_signatures() -> None:
    from vllm.v1.sample import rejection_sampler

    for name, wanted in SIGNATURES.items():
        function = getattr(rejection_sampler, name, None)
        parameters = " ".join(inspect.signature(inspect.unwrap(function)).parameters) if function else "nothing"
        if parameters != wanted:
            raise ReprieveError(f"vLLM's {name} takes ({parameters}), the plugin was written for ({wanted})")


def _after(kind: type, name: str, then: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        then(self, *args, **kwargs)
        return made

    setattr(kind, name, wrapped)


def _before(kind: type, name: str, first: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, name, wrapped)


def _after_async(kind: type, name: str, then: Callable[..., Any]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    async def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = await original(self, *args, **kwargs)
        await then(self)
        return made

    setattr(kind, name, wrapped)
