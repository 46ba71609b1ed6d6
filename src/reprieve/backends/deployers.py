"""Deployers by engine: new vLLM servers, or running ones."""

from __future__ import annotations

from reprieve.backends.deploying import Deployer, RunningServers, VllmDeployer
from reprieve.backends.ray import RayDeployer
from reprieve.backends.settings import OpenAISettings, RaySettings, ServerSettings, VllmSettings
from reprieve.settings import PairSettings


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
