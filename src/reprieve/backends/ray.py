"""vLLM on the nodes of a Ray cluster: an actor for each replica starts a server where Ray has room for it.

Ray Serve's and Ray Data's own LLM modules are not used: they are tied to one release of vLLM, which is older than those
the plugin works with.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from reprieve.backends.deployers import Announce, ServerPlan, VllmDeployer
from reprieve.backends.servers import Running, facts_of
from reprieve.backends.settings import RaySettings
from reprieve.backends.vllm import MODEL_NAME, Deployment, start_vllm
from reprieve.errors import EngineError, ReprieveError, import_extra

_CLOSING_S = 60.0


@dataclass(frozen=True)
class RayDeployer(VllmDeployer):
    """Starts vLLM on the cluster of RAY_ADDRESS, or on one started here."""

    settings: RaySettings

    def start(self, plan: ServerPlan, announce: Announce) -> Running:
        """Start replicas that share the work; if one dies, the others continue.

        Raises:
            ReprieveError: Ray is missing, the cluster has no room, or a replica does not come up.
        """
        ray = import_extra("ray", "ray")
        if not ray.is_initialized():
            own = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
            ray.init(log_to_driver=False, **own)
        num = self.settings.replicas
        on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        needed = {"num_gpus": self.settings.tensor_parallel} if on_gpu else {"num_cpus": 1}
        _require_room(ray, num, "GPU" if on_gpu else "CPU", self.settings.tensor_parallel if on_gpu else 1)
        announce(f"starting vLLM on {num} replicas of a Ray cluster: {self.words(plan)}")
        kind = ray.remote(**needed)(_Replica)
        here = ray.util.get_node_ip_address()
        actors = [kind.remote() for _ in range(num)]

        def close() -> None:
            with contextlib.suppress(ray.exceptions.RayError):  # the kill below ends them too
                ray.get([actor.close.remote() for actor in actors], timeout=_CLOSING_S)
            for actor in actors:
                ray.kill(actor)

        try:
            started = [actor.start.remote(self.deployment(plan), self.settings, here) for actor in actors]
            urls = tuple(ray.get(started, timeout=self.settings.startup))
            return Running(urls, MODEL_NAME, facts_of(urls), close=close)
        except ray.exceptions.RayError as error:
            close()
            cause = getattr(error, "cause", None)  # what was raised in the replica; Ray's own text is a traceback
            reason = str(cause) if isinstance(cause, ReprieveError) else str(error).strip()[-600:]
            raise EngineError(f"a replica did not start: {reason}") from None
        except BaseException:
            close()
            raise


def _require_room(ray: Any, num: int, resource: str, each: int) -> None:
    """Refuse replicas that Ray could never place."""
    room = sum(int(node["Resources"].get(resource, 0)) // each for node in ray.nodes() if node["Alive"])
    if room < num:
        raise ReprieveError(f"replicas must be at most {room}, of {each} {resource} each on one node, got {num}")


class _Replica:
    """Ray actor that runs a server on its node; the server ends with the actor."""

    def __init__(self) -> None:
        self._running: Running | None = None

    def start(self, deployment: Deployment, settings: RaySettings, driver: str) -> str:
        """Start the server; returns its address."""
        import ray

        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._running = start_vllm(deployment, settings, host="127.0.0.1" if node == driver else node)
        return self._running.urls[0]

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
