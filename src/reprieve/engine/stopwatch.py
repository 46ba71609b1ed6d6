"""Where an answer's time goes. Off unless a run measures: on a GPU, timing a part means waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from reprieve.types import PARTS


class Stopwatch:
    """Adds up seconds by part of an answer (`PARTS`); a part may be entered many times, not one inside another.

    Args:
        device: waited for at both ends of a part.
        running: False makes every part free.
    """

    def __init__(self, device: torch.device, *, running: bool) -> None:
        self.device = device
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0) if running else {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
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
