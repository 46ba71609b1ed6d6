"""What trainers that run for hours share: a learning rate schedule, and checkpoints that survive a kill."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from reprieve.errors import ReprieveError


class Schedule(Protocol):
    """How long a training is and how fast it learns."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_updates(self) -> int: ...
    @property
    def num_updates(self) -> int: ...


def learning_rate_at(schedule: Schedule, update: int) -> float:
    """Linear warm-up, then a cosine down to 2% of the peak."""
    if update < schedule.warmup_updates:
        return schedule.learning_rate * (update + 1) / schedule.warmup_updates
    done = (update - schedule.warmup_updates) / max(1, schedule.num_updates - schedule.warmup_updates)
    return schedule.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, recipe: str, update: int, seconds: float
) -> None:
    """Trained weights and optimiser state in one safetensors file, renamed into place when complete."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    tensors = {f"model.{name}": parameter.detach().contiguous() for name, parameter in named}
    for name, parameter in named:
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value.detach().clone().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"update": str(update), "seconds": f"{seconds:.1f}", "recipe": recipe})
    os.replace(temporary, path)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, recipe: str
) -> tuple[int, float] | None:
    """Put a checkpoint's weights and state back; updates done and seconds spent, or None where there is no file.

    Raises:
        ReprieveError: it was written under another recipe, or is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
        if metadata.get("recipe") != recipe:
            raise ReprieveError(f"{path} belongs to another recipe; remove it, or train into another folder")
        tensors = load_file(path, device=str(next(model.parameters()).device))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(tensors[f"model.{name}"])
                    optimizer.state[parameter] = {
                        key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
                    }
        return int(metadata["update"]), float(metadata["seconds"])
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise ReprieveError(f"{path} cannot be read as a checkpoint: {error}; remove it to start again") from None
