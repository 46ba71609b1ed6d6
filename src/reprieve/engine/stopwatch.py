"""Seconds by part of an answer. Off by default, because timing synchronises the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from reprieve.types import PARTS


class Stopwatch:
    """Sum of seconds by part of an answer (`PARTS`). Parts can repeat but not nest.

    Args:
        device: synchronised at both ends of a part.
        running: False disables all measurements.
    """

    def __init__(self, device: torch.device, *, running: bool) -> None:
        self.device = device
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0) if running else {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the enclosed code."""
        if not self.seconds:
            yield
            return
        started = self._now()
        yield
        self.seconds[name] += self._now() - started

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
