"""Copies between host and device: non-blocking ones to the device, and a single blocking one back.

A plain `tensor.tolist()` or `torch.tensor(..., device="cuda")` makes the host wait until the device has finished all
queued work. A round with constant K waits at most twice, through `to_host`; an adaptive draft length waits more often.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def device_tensor(values: list[float] | list[bool] | list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values on the device, without waiting for it."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_host(*tensors: Tensor) -> list[list[float]]:
    """Copy several small tensors to the host at once, as flat lists of numbers: the host waits once.

    Whole numbers up to 2^53 (2^24 where the device has no float64) come through exactly.
    """
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors]).tolist()
    lists, start = [], 0
    for tensor in tensors:
        lists.append(flat[start : start + tensor.numel()])
        start += tensor.numel()
    return lists
