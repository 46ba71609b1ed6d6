"""Commit, versions and machine, as results and certificates record them."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import reprieve


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Processor, cores, threads and GPUs."""

    platform: str
    processor: str
    num_cpus: int | None
    num_threads: int
    gpus: list[str]

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(
            platform=platform.platform(terse=True),
            processor=_processor(),
            num_cpus=os.cpu_count(),
            num_threads=torch.get_num_threads(),
            gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        )


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Code, package versions and machine of a measurement."""

    commit: str | None  # of the source checkout, "-dirty" where files differ; None outside one
    versions: dict[str, str]
    machine: Machine

    @classmethod
    def here(cls) -> Environment:
        """This process's environment."""
        packages = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}
        versions = {"python": platform.python_version(), "reprieve": reprieve.__version__, **packages}
        return cls(commit=commit(), versions=versions, machine=Machine.here())


def commit() -> str | None:
    """The commit of the source checkout this package runs from, "-dirty" where files differ; None outside one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        output = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
