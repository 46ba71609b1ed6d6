"""The engine that `--engine` names, and the deployer of its servers."""

from __future__ import annotations

from collections.abc import Callable

from reprieve.backends.batched import BatchedEngine
from reprieve.backends.deployers import Deployer, RunningServers, VllmDeployer
from reprieve.backends.local import LocalEngine
from reprieve.backends.ray import RayDeployer
from reprieve.backends.served import ServedEngine
from reprieve.backends.settings import (
    BatchedSettings,
    EngineSettings,
    OpenAISettings,
    RaySettings,
    ServerSettings,
    VllmSettings,
)
from reprieve.bench.engine import Engine
from reprieve.engine.pair import load_configured
from reprieve.errors import SpecError
from reprieve.models.stored import stored_identity
from reprieve.settings import PairSettings


def make_engine(
    settings: EngineSettings,
    pair: PairSettings,
    *,
    num_workers: int = 1,
    announce: Callable[[str], None] = lambda line: None,
) -> Engine:
    """An engine for a pair; close it when done.

    Args:
        num_workers: processes of the local engine.
        announce: called with a line when a server is started.

    Raises:
        SpecError: several workers with another engine, or for a target on several devices.
        ReprieveError: a model that cannot be found, or a running server that does not answer.
    """
    if settings.local:
        if num_workers > 1 and pair.device_map is not None:
            raise SpecError(f"workers must be 1 with --device-map, got {num_workers}: each worker loads the target")
        return LocalEngine(load_configured(pair, announce), num_workers=num_workers)
    if num_workers > 1:
        raise SpecError("--workers applies to --engine local only; set parallel= in --engine instead")
    kind = settings.kind
    if isinstance(kind, BatchedSettings):
        return BatchedEngine(load_configured(pair, announce, decodes=False), kind)
    identity, tokenizer, dtype = stored_identity(pair)
    return ServedEngine(make_deployer(settings.servers, pair, dtype), tokenizer, identity, announce=announce)


def make_deployer(settings: ServerSettings, pair: PairSettings, dtype: str) -> Deployer:
    """Return the deployer that starts or finds the servers of `--engine`.

    Raises:
        EngineError: running servers that do not answer.
    """
    if isinstance(settings, OpenAISettings):
        return RunningServers(settings, dtype)
    if isinstance(settings, RaySettings):
        return RayDeployer(settings, pair, dtype)
    assert isinstance(settings, VllmSettings)
    return VllmDeployer(settings, pair, dtype)
