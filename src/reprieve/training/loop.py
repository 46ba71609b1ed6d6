"""Training loop with checkpoints; a resumed run gives the same result as an uninterrupted one."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reprieve.errors import ReprieveError
from reprieve.files import append_line, parse_json, replace_file, whole_lines
from reprieve.types import Progress, no_progress

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_SECONDS = 120.0
_LOG = "metrics.jsonl"


class Learner(ABC):
    """Definition of a training run: by default, of a network's trained weights by AdamW.

    An update depends only on state, number and seed, so a resumed run repeats it.
    """

    model: Any  # a module
    optimizer: torch.optim.AdamW

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """Number of updates."""

    @property
    @abstractmethod
    def recipe(self) -> str:
        """Settings, models and data of the training; a checkpoint must have the same."""

    @abstractmethod
    def one_update(self, update: int) -> dict[str, float]:
        """Run update number `update`, from 0; return metrics for the log."""

    def validates_after(self, update: int) -> bool:
        """Return True to validate after `update` updates; 0 is before the first."""
        return False

    def validate(self, update: int, seconds: float) -> dict[str, float]:
        """Validate on held-out data, save the result if it should be kept, and return metrics for the log.

        Args:
            seconds: spent on updates so far.
        """
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, by name."""
        tensors = {}
        for name, parameter in self._trained():
            tensors[f"model.{name}"] = parameter.detach().contiguous()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value.detach().clone().contiguous()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a saved state."""
        for name, parameter in self._trained():
            device = parameter.device
            parameter.copy_(tensors[f"model.{name}"])
            self.optimizer.state[parameter] = {
                "step": tensors[f"step.{name}"],
                "exp_avg": tensors[f"exp_avg.{name}"].to(device),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(device),
            }

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, tensor) for name, tensor in self.model.named_parameters() if tensor.requires_grad)


def train(
    learner: Learner, folder: Path, *, progress: Progress = no_progress, checkpoint_seconds: float = CHECKPOINT_SECONDS
) -> float:
    """Run a learner's updates; resumes from the checkpoint in its folder.

    Ctrl-C stops training after the current update and saves a checkpoint.

    Args:
        folder: for `checkpoint.safetensors`, and `metrics.jsonl` with the scalars of each step.

    Returns:
        Seconds spent on updates, including those before an interruption.

    Raises:
        ReprieveError: a checkpoint of another recipe, or a damaged one.
        KeyboardInterrupt: after Ctrl-C.
    """
    update, seconds = _restore(learner, folder / CHECKPOINT)
    _drop_entries(folder / _LOG, update + 1 if update else 0)
    saved = time.perf_counter()

    def log(kind: str, values: Mapping[str, float]) -> None:
        append_line(folder / _LOG, {"step": update, "kind": kind, **values}, "the steps before the last checkpoint")

    def save() -> None:
        nonlocal saved
        _save(learner, folder / CHECKPOINT, update, seconds)
        saved = time.perf_counter()

    with _deferred_interrupt() as interrupted:
        if update == 0 and learner.validates_after(0):
            log("validation", learner.validate(0, seconds))
        while update < learner.num_updates:
            started = time.perf_counter()
            numbers = learner.one_update(update)
            update += 1
            seconds += time.perf_counter() - started
            log("train", numbers)
            if learner.validates_after(update):
                log("validation", learner.validate(update, seconds))
            # Save after the validation: resuming from an earlier checkpoint would skip it.
            if interrupted() or learner.validates_after(update) or time.perf_counter() - saved > checkpoint_seconds:
                save()
            try:
                progress(update, learner.num_updates)
            except BaseException:  # between two updates, so the state is consistent
                save()
                raise
            if interrupted():
                raise KeyboardInterrupt
    save()
    return seconds


def learning_rate_at(update: int, *, peak: float, num_warmup: int, num_updates: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to 2% of the peak."""
    if update < num_warmup:
        return peak * (update + 1) / num_warmup
    done = (update - num_warmup) / max(1, num_updates - num_warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _drop_entries(log: Path, first_step: int) -> None:
    """Drop a log's entries from `first_step` on."""
    try:
        kept = [line for line in whole_lines(log, repair=True) if parse_json(line)["step"] < first_step]
    except (ValueError, KeyError, TypeError):
        raise ReprieveError(f"{str(log)!r} is damaged: move it away to continue without it") from None
    replace_file(log, "".join(f"{line}\n" for line in kept))


def _save(learner: Learner, path: Path, update: int, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    metadata = {"update": str(update), "seconds": f"{seconds:.1f}", "recipe": learner.recipe}
    save_file(learner.state(), temporary, metadata=metadata)
    os.replace(temporary, path)


def _restore(learner: Learner, path: Path) -> tuple[int, float]:
    """Restore the learner's state; return updates done and seconds spent."""
    if not path.exists():
        return 0, 0.0
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
        if metadata.get("recipe") != learner.recipe:
            raise ReprieveError(f"{path} belongs to another recipe; remove it, or train into another folder")
        learner.load_state(load_file(path))
        return int(metadata["update"]), float(metadata["seconds"])
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise ReprieveError(f"{path} cannot be read as a checkpoint: {error}; remove it to start again") from None


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag, so that no update is left incomplete; a second Ctrl-C interrupts at once."""
    interrupted = False

    def note(number: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)
