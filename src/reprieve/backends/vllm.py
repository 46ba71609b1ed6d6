"""vLLM's OpenAI server, started here with the plugin and ended again."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reprieve.backends.servers import Running, answers, facts_of
from reprieve.backends.settings import VllmSettings
from reprieve.errors import EngineError, ReprieveError, install_command

SERVER = "vllm.entrypoints.openai.api_server"
MODEL_NAME = "target"
_GRACE_S = 30
_POLL_S = 0.5
_LOG_LINES = 12


@dataclass(frozen=True)
class Deployment:
    """Model, speculation and rules of one server.

    Args:
        model: folder or hub id.
        speculation: vLLM's speculative configuration; None to serve without speculation and without the plugin.
        rules: rules that requests can select.
    """

    model: str
    dtype: str
    speculation: Mapping[str, Any] | None = None
    rules: Sequence[str] = field(default_factory=tuple)

    def flags(self, settings: VllmSettings, policy: Path) -> list[str]:
        """Return vLLM's flags except those of the model; `policy` is the file that holds the rules."""
        given = {
            "--generation-config": "vllm",  # sampling is the requests' own, not the model's
            "--dtype": self.dtype,
            "--max-model-len": settings.max_model_len,
            "--max-num-seqs": settings.max_num_seqs,
            "--gpu-memory-utilization": settings.gpu_memory_utilization,
            "--tensor-parallel-size": settings.tensor_parallel if settings.tensor_parallel > 1 else None,
        }
        flags = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
        flags += ["--enforce-eager"] if settings.eager or not _has_gpu() else []
        # The CPU build crashes on chunked prefill of seeded, sampled requests. (vLLM warns about this flag for models
        # that support chunked prefill.)
        flags += [] if _has_gpu() else ["--no-enable-chunked-prefill"]
        if self.speculation is not None:
            speculation = ["--speculative-config", json.dumps(self.speculation)]
            flags += [*speculation, "--per-request-spec-decode-metrics", "summary"]
        if self.rules:
            flags += ["--additional-config", json.dumps({"reprieve": str(policy)})]
        return [*flags, *shlex.split(settings.arguments)]


def start_vllm(deployment: Deployment, settings: VllmSettings, *, host: str = "127.0.0.1") -> Running:
    """Start a vLLM server and return once it answers.

    Args:
        host: address that it listens on.

    Raises:
        ReprieveError: vLLM is not installed, refuses its configuration, or does not come up in time.
        EngineError: vLLM runs without the plugin although it was given rules.
    """
    if find_spec("vllm") is None:
        raise ReprieveError(
            f"engine vllm requires vLLM in this environment: {install_command('vllm')}, or, without a GPU, "
            "`make .venv-vllm/.ready` in a checkout"
        )
    folder = Path(tempfile.mkdtemp(prefix="reprieve-vllm-"))
    port = _free_port()
    url, log = f"http://{host}:{port}", folder / "vllm.log"
    policy = folder / "policy.json"
    policy.write_text(json.dumps({"rules": [{"rule": rule} for rule in deployment.rules]}), encoding="utf-8")
    model = ["--model", deployment.model, "--served-model-name", MODEL_NAME]
    flags = [*model, *deployment.flags(settings, policy), "--host", host, "--port", str(port)]
    command = [sys.executable, "-m", "reprieve.backends.child", str(os.getpid()), SERVER, *flags]
    with log.open("wb") as out:
        # In a separate session: Ctrl-C reaches only this process, which then ends the server.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(settings), start_new_session=True)
    why = _FailureLog(process, log)
    try:
        deadline = time.monotonic() + settings.startup
        while not answers(url):
            if process.poll() is not None:
                raise ReprieveError(f"vLLM did not start{why()}")
            if time.monotonic() > deadline:
                raise ReprieveError(f"vLLM was not up after {settings.startup:g} s (startup=){why()}")
            time.sleep(_POLL_S)
        facts = facts_of([url])
        if deployment.rules and not facts.rules:  # it would decode losslessly
            raise EngineError("vLLM runs without the plugin: install Reprieve in its environment (VLLM_PLUGINS unset)")
    except BaseException:
        _end(process)
        raise

    def close() -> None:
        alive = process.poll() is None
        _end(process)
        if alive and not why.shown:  # else an error message refers to the log
            shutil.rmtree(folder, ignore_errors=True)

    return Running((url,), MODEL_NAME, facts, close=close, why=why)


@dataclass
class _FailureLog:
    """Explanation of a server's failure: its exit status and the last errors in its log."""

    process: subprocess.Popen[bytes]
    log: Path
    shown: bool = False

    def __call__(self) -> str:
        self.shown = True
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line and "Traceback" not in line]
        status = self.process.poll()
        ended = "" if status is None else f"; it ended with status {status}"
        return f"{ended}; see {self.log}:\n" + "\n".join((errors or lines)[-_LOG_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all its processes."""
    for stop, seconds in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        if process.poll() is not None:
            break
        try:
            os.killpg(process.pid, stop)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what its own processes left


def _environment(settings: VllmSettings) -> dict[str, str]:
    """Return vLLM's environment. Without a GPU, its defaults reserve 4 GiB and bind cores that others may hold."""
    environment = dict(os.environ)
    if settings.runner is not None:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(int(settings.runner == "v2"))
    if not _has_gpu():
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
