"""Environment of a measurement: hardware, software versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import reprieve


def versions() -> dict[str, str]:
    """Versions of what a result can depend on."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}
    return {"python": platform.python_version(), "reprieve": reprieve.__version__, **packages}


def machine() -> dict[str, Any]:
    """Processor, cores, threads and GPUs."""
    return {
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


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
