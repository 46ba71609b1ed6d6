"""Settings of the engine that `--engine` names, one record for each kind. Nothing here contacts a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from reprieve.errors import SpecError, require_choice, require_counts, require_range, require_whole
from reprieve.settings import AUTO, NumDraftTokens
from reprieve.specs import construct, parse_spec

LOCAL = "local"
SERVED_DRAFT_TOKENS = 8  # K for `auto` on servers, which draft a fixed number of tokens per round


@dataclass(frozen=True)
class LocalSettings:
    """Settings of the engine that answers one prompt at a time in this process: none."""

    name: ClassVar[str] = LOCAL


@dataclass(frozen=True)
class BatchedSettings:
    """Settings of the batched engine, which runs the models in this process with many answers per forward.

    Args:
        parallel: maximum number of answers in a batch.
    """

    name: ClassVar[str] = "batched"

    parallel: int = 64

    def __post_init__(self) -> None:
        require_whole("parallel", self.parallel, 1)


@dataclass(frozen=True)
class ServerSettings:
    """Settings that all kinds of servers share.

    Args:
        parallel: maximum number of requests in flight; the server batches them.
        timeout: seconds per attempt until a request without an answer is given up.
    """

    name: ClassVar[str]

    parallel: int = 128
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        require_whole("parallel", self.parallel, 1)
        require_range("timeout", self.timeout, 0.0, 1e6, low_open=True)


@dataclass(frozen=True)
class VllmSettings(ServerSettings):
    """vLLM in a process of its own, with the plugin.

    Args:
        max_model_len, max_num_seqs, gpu_memory_utilization, tensor_parallel: vLLM's own; None for its defaults.
        runner: vLLM's model runner, v1 or v2; None for vLLM's default.
        eager: without compilation and CUDA graphs.
        arguments: more of vLLM's flags, as one text.
        startup: seconds it may take to come up.
    """

    name = "vllm"

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel: int = 1
    runner: str | None = None
    eager: bool = False
    arguments: str = ""
    startup: float = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("runner", self.runner, (None, "v1", "v2"))
        require_counts(self, "max_model_len", "max_num_seqs", "tensor_parallel")
        require_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, low_open=True, optional=True)
        require_range("startup", self.startup, 0.0, 1e6, low_open=True)


@dataclass(frozen=True)
class RaySettings(VllmSettings):
    """vLLM on the nodes of a Ray cluster: several replicas share the work.

    Args:
        replicas: number of servers.
    """

    name = "ray"

    replicas: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("replicas", self.replicas, 1)


@dataclass(frozen=True)
class OpenAISettings(ServerSettings):
    """Running servers; $OPENAI_API_KEY is sent where it is set.

    Args:
        url: where they listen, such as http://127.0.0.1:8000; several are separated by `;` and share the work.
        model: the target's name there; None for the only one that is served.
    """

    name = "openai"

    url: str = ""
    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.urls or any(not url.startswith(("http://", "https://")) for url in self.urls):
            raise SpecError(f"engine openai needs url=http://HOST:PORT, several separated by `;`, got {self.url!r}")
        if any("@" in urlsplit(url).netloc for url in self.urls):
            raise SpecError("engine openai: url must not hold a password; set OPENAI_API_KEY instead")

    @property
    def urls(self) -> tuple[str, ...]:
        """One for each server, without a trailing /v1."""
        parts = (part.strip().rstrip("/").removesuffix("/v1") for part in self.url.split(";"))
        return tuple(part for part in parts if part)


_KINDS = {kind.name: kind for kind in (LocalSettings, BatchedSettings, OpenAISettings, RaySettings, VllmSettings)}


@dataclass(frozen=True)
class EngineSettings:
    """Engine that generates the answers.

    Args:
        engine: local; batched:parallel=64 (local, many answers at once; bench, certify and monitor only); vllm
            (started here, with the plugin); openai:url=http://HOST:PORT (a running server); or ray:replicas=N. See
            docs/guides/engines.md.
    """

    engine: str = LOCAL

    def __post_init__(self) -> None:
        _ = self.kind  # refuses what cannot be read

    @property
    def kind(self) -> LocalSettings | BatchedSettings | ServerSettings:
        """Settings of the engine that is named.

        Raises:
            SpecError: an unknown engine, or a parameter that cannot be read.
        """
        name, given = parse_spec(self.engine, what="engine")
        require_choice("engine", name, tuple(_KINDS))
        made: LocalSettings | BatchedSettings | ServerSettings
        made = construct(_KINDS[name], given, where=f"engine {name}")
        return made

    @property
    def local(self) -> bool:
        """True if the engine runs in this process and answers one prompt at a time."""
        return isinstance(self.kind, LocalSettings)

    @property
    def batched(self) -> bool:
        """True if the engine runs in this process and answers many prompts at once."""
        return isinstance(self.kind, BatchedSettings)

    @property
    def servers(self) -> ServerSettings:
        """Settings of its servers; for engines with servers only."""
        kind = self.kind
        assert isinstance(kind, ServerSettings)
        return kind

    def draft_tokens(self, *wanted: NumDraftTokens) -> tuple[NumDraftTokens, ...]:
        """Return the requested draft lengths in the form that this engine supports, without duplicates."""
        if self.local:
            return wanted
        return tuple(dict.fromkeys(SERVED_DRAFT_TOKENS if k == AUTO else k for k in wanted))
