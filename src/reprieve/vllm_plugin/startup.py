"""Entry points of the plugin at vLLM's startup and at each request, on both model runners.

No kernel is replaced: see `v1` and `v2_processor`. `probing` lists the parts of vLLM that this requires.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reprieve.errors import ReprieveError
from reprieve.heads.certificates import portable_spec
from reprieve.policies.menu import Menu
from reprieve.policies.policy import LEVEL, PREFIX, Policy, RequestError
from reprieve.vllm_plugin import configuration, metrics, probing, require_healthy
from reprieve.vllm_plugin.configuration import runner_of
from reprieve.vllm_plugin.rounds import WorkerRules, request_settings

logger = logging.getLogger("vllm.reprieve")

_FRESH_S = 5.0  # age up to which a status is reused: a new request makes the engine finish the steps in progress
_PATIENCE_S = 10.0  # wait of one health check; a slow step is not a failure
_STUCK_S = 600.0  # without an answer; vLLM itself gives up on a step after 300 s


def register() -> None:
    """Wrap vLLM's startup functions, once per process; each wrapper first checks for a configuration.

    In a vLLM without these functions the front end cannot refuse a configured start, so the workers refuse it.
    """
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    if hasattr(WorkerBase, "reprieve_status"):
        return
    WorkerBase.reprieve_status = _status
    WorkerBase.reprieve_install = _install
    try:
        _wrap_front_end()
    except (ImportError, AttributeError) as error:
        reason = f"Reprieve's plugin does not fit this vLLM: {error}"
        _before(WorkerWrapperBase, "init_device", lambda wrapper, *rest, **more: _refuse(wrapper.vllm_config, reason))
        logger.warning("%s; vLLM will not start if Reprieve is configured", reason)


def _refuse(vllm_config: Any, reason: str) -> None:
    if configuration.source_of(vllm_config.additional_config) is not None:
        raise ReprieveError(reason)


def _wrap_front_end() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    _before(InputProcessor, "__init__", lambda processor, vllm_config, *rest, **more: _prepare(vllm_config))
    _before(InputProcessor, "_validate_params", _validate)
    _before(EngineCore, "_initialize_kv_caches", _install_in_workers)

    check = AsyncLLM.check_health

    @functools.wraps(check)
    async def check_health(self: Any) -> None:
        await check(self)
        await _require_healthy(self)

    AsyncLLM.check_health = check_health


def _menu(vllm_config: Any) -> Menu | None:
    source = configuration.source_of(vllm_config.additional_config)
    if source is None:
        return None
    return configuration.load_menu(source, vllm_config.model_config.model, **_conditions(vllm_config))


def _conditions(vllm_config: Any) -> dict[str, Any]:
    """Return the conditions of certificates that a server knows."""
    from vllm.version import __version__

    spec = vllm_config.speculative_config
    return {
        "engine": "vllm",
        "engine_version": __version__,
        "runner": runner_of(vllm_config),
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "drafter": None if spec is None else {"draft_model": "draft"}.get(spec.method, spec.method),
        "num_draft_tokens": None if spec is None else spec.num_speculative_tokens,
    }


def _prepare(vllm_config: Any) -> None:
    """In the front end, before the engine starts: refuse unsupported set-ups, and add fields for our counts."""
    menu = _menu(vllm_config)
    if menu is None:
        return
    from vllm.version import __version__

    if warning := configuration.version_warning(__version__, runner_of(vllm_config)):
        logger.warning(warning)
    configuration.require_supported(vllm_config, menu)
    model = vllm_config.model_config
    configuration.require_markers(
        menu, model.model, lambda: configuration.load_tokenizer(model.tokenizer, model.trust_remote_code)
    )
    _enable_request_metrics(vllm_config)
    rules = {name: portable_spec(policy.rule) for name, policy in menu.policies.items()}
    labels = {name: str(value) for name, value in _conditions(vllm_config).items()}
    metrics.extend({**labels, "rules": json.dumps(rules)})
    _refuse_stray_fields()


def _enable_request_metrics(vllm_config: Any) -> None:
    """Turn on vLLM's per-request metrics, in which a response reports that it was decoded leniently."""
    observability = vllm_config.observability_config
    if vllm_config.speculative_config is not None and observability.per_request_spec_decode_metrics == "none":
        observability.per_request_spec_decode_metrics = "summary"


def _refuse_stray_fields() -> None:
    """Make vLLM refuse `reprieve_` fields outside of vllm_xargs, which it would otherwise ignore; once per process."""
    try:
        from vllm.entrypoints.serve.engine.serving import BaseServing
    except ImportError as error:
        logger.warning("this vLLM ignores reprieve_ fields outside of vllm_xargs, and does not refuse them: %s", error)
        return
    check = BaseServing._check_model
    if hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    async def check_fields(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _field_names(getattr(request, "model_extra", None) or {}):
            if name.startswith(PREFIX):
                shown = name[:100] if name.isprintable() else repr(name[:100])
                return self.create_error_response(
                    f'{shown} must be given in vllm_xargs, as {{"vllm_xargs": {{"{LEVEL}": "strict"}}}}', param=shown
                )
        return await check(self, request, *args, **kwargs)

    BaseServing._check_model = check_fields


def _field_names(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a request's unknown fields, also those in objects that clients mistake for `vllm_xargs`."""
    objects = [extra]
    while objects:
        for name, value in objects.pop().items():
            yield name
            if name in ("extra_args", "extra_body", "vllm_xargs") and isinstance(value, Mapping):
                objects.append(value)


def _validate(processor: Any, params: Any, *rest: Any) -> None:
    """Check a request's fields in the front end; the client sees an error as status 400."""
    extra_args = getattr(params, "extra_args", None)
    if not extra_args or not any(name.startswith(PREFIX) for name in extra_args):
        return
    menu = _menu(processor.vllm_config)
    if menu is None:
        return
    from vllm.exceptions import VLLMValidationError

    try:
        menu.choose(request_settings(params))
    except RequestError as error:
        # Without `value`: vLLM would repeat it at any length, and the message already shows it.
        raise VLLMValidationError(str(error), parameter=error.parameter) from None


def _install_in_workers(engine: Any, vllm_config: Any) -> None:
    """Install the plugin in all workers; refuse to serve if one lacks it. Runs in the engine process, after loading."""
    menu = _menu(vllm_config)
    if menu is None:
        return
    # The scheduler is created later; the front end may have launched this process before it changed the setting.
    _enable_request_metrics(vllm_config)
    metrics.extend()
    try:
        statuses = engine.collective_rpc("reprieve_install")
    except ReprieveError:
        raise
    except Exception as error:
        raise ReprieveError(f"Reprieve's plugin is configured but did not load in a worker: {error}") from None
    require_healthy(statuses)
    described = "; ".join(policy.describe() for policy in menu.policies.values())
    if menu.strict_only:
        described = f"strict_only: every request is decoded losslessly; {described}"
    logger.info("Reprieve is active in %d worker(s): %s", len(statuses), described)
    if any(policy.certificate is not None for policy in menu.policies.values()):
        logger.info(
            "The server checks a certificate's engine, version, runner, dtype, drafter and K; clients are responsible "
            "for task, prompt format and sampling, the operator for the weights"
        )


async def _require_healthy(engine: Any) -> None:
    """Fail the health check of an engine whose workers do not apply the rules.

    The request has no timeout: after one, vLLM's executor would leave the reply in its queue, and the next step would
    read it as its own. A failure is permanent until the server restarts.
    """
    if _menu(engine.vllm_config) is None:
        return
    from vllm.v1.engine.exceptions import EngineDeadError

    if (failure := getattr(engine, "reprieve_failure", None)) is not None:
        raise EngineDeadError from failure
    reply, sent = getattr(engine, "reprieve_status_request", (None, 0.0))  # shared by concurrent checks
    if reply is None or (reply.done() and time.monotonic() - sent > _FRESH_S):
        reply, sent = asyncio.ensure_future(engine.collective_rpc("reprieve_status")), time.monotonic()
        engine.reprieve_status_request = reply, sent
    await asyncio.wait({reply}, timeout=_PATIENCE_S)
    waited = time.monotonic() - sent
    if not reply.done() and waited < _STUCK_S:
        return
    try:
        if not reply.done():
            raise ReprieveError(f"the workers have not answered for {waited:.0f} s")
        require_healthy(reply.result())
    except Exception as error:
        engine.reprieve_failure = error
        logger.error("unhealthy: %s", error)
        raise EngineDeadError from error


def _status(worker: Any) -> dict[str, Any]:
    hooks = getattr(worker.model_runner, "reprieve", None)
    if hooks is None:
        return {"active": False, "rank": worker.rank, "failures": 0}
    status: dict[str, Any] = hooks.rules.status
    return status


def _install(worker: Any) -> dict[str, Any]:
    """Refuse unsupported set-ups, install the hooks, return the worker's status. Runs in a worker, after loading.

    Raises:
        ReprieveError: this vLLM or this set-up does not fit, or the self-test failed.
    """
    menu = _menu(worker.vllm_config)
    assert menu is not None, "the engine has it, and the workers have the engine's configuration"
    configuration.require_supported(worker.vllm_config, menu)
    runner = worker.model_runner
    kind = probing.runner_kind(runner)
    probing.require_parts(probing.PARTS[kind], probing.live)
    rules = worker_rules(menu, worker)
    runner.reprieve = importlib.import_module(f"reprieve.vllm_plugin.{kind}").Hooks(rules, runner)
    if getattr(runner, "rejection_sampler", None) is not None:  # else not the last stage: nothing is sampled here
        runner.reprieve.install()
        probing.run_selftest(runner.reprieve)
        probing.require_last_states(runner, rules.menu)
    return _status(worker)


def worker_rules(menu: Menu, worker: Any) -> WorkerRules:
    """The operator's rules, made ready for a worker: bound to its tokenizer, their heads on its device.

    Raises:
        PairError: a head made for another tokenizer.
    """
    model = worker.vllm_config.model_config

    def tokenizer() -> Any:
        return configuration.load_tokenizer(model.tokenizer, model.trust_remote_code)

    def ready(policy: Policy) -> Policy:
        rule = policy.rule
        if rule.traits.reads_text or rule.heads:
            configuration.require_tokenizer(rule, tokenizer())
            rule = rule.bind(tokenizer())
        return dataclasses.replace(policy, rule=rule.to(worker.model_runner.device))

    return WorkerRules(menu.map_policies(ready), rank=worker.rank)


def _before(kind: type, name: str, first: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, name, wrapped)
