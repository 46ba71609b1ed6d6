"""Joules, where the machine measures them: NVML for NVIDIA GPUs, RAPL for processors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """Sums the machine's energy counters. They include all processes, so measure on an idle machine.

    Args:
        device: torch's name of the device in use; a GPU's counter is read only for a CUDA device.
        rapl: folder of the kernel's power-capping interface.
    """

    def __init__(self, device: str, *, rapl: Path = RAPL) -> None:
        self._domains = [path for path in sorted(rapl.glob("intel-rapl:[0-9]")) if _microjoules(path) is not None]
        self._last = {path: _microjoules(path) or 0 for path in self._domains}
        self._processor_j = 0.0
        self._gpu = _gpu_handle(device) if device.startswith("cuda") else None

    @property
    def source(self) -> str:
        """Sources of the energy readings, or the reason why there are none."""
        parts = (["NVML"] if self._gpu else []) + (["RAPL"] if self._domains else [])
        return "+".join(parts) or "unavailable: this machine reports no energy (no RAPL counters, no NVML)"

    def joules(self) -> float | None:
        """Return joules since a fixed moment: only differences are meaningful. None if nothing is reported."""
        if not self._gpu and not self._domains:
            return None
        for path in self._domains:
            now = _microjoules(path) or 0
            passed = now - self._last[path]
            if passed < 0:  # the counter wrapped around
                passed += int((path / "max_energy_range_uj").read_text())
            self._processor_j += passed / 1e6
            self._last[path] = now
        gpu_j = 0.0
        if self._gpu:
            library, handle = self._gpu
            gpu_j = library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        return self._processor_j + gpu_j


def _microjoules(path: Path) -> int | None:
    try:
        return int((path / "energy_uj").read_text())
    except (OSError, ValueError):
        return None  # only root may read it on most machines


def _gpu_handle(device: str) -> tuple[Any, Any] | None:
    """NVML's library and its handle of a GPU that counts joules; None without either."""
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2] or 0))
        library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no library, no driver, no such counter: NVML has an error for each
        return None
    return library, handle
