"""Between host and device: copies that the host need not wait for, and one that it waits for once.

A plain `tensor.tolist()` or `torch.tensor(..., device="cuda")` makes the host wait until the device has done all it was
given. A round of constant K does so at most twice, through `to_host`; a length decided on the way asks more often.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def spread(values: list[float] | list[bool] | list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values on the device, without waiting for it."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_host(*tensors: Tensor) -> list[list[float]]:
    """Several small tensors as flat lists of numbers, in one copy: the host waits once.

    Whole numbers up to 2^53 (2^24 where the device has no float64) come through exactly.
    """
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors]).tolist()
    lists, start = [], 0
    for tensor in tensors:
        lists.append(flat[start : start + tensor.numel()])
        start += tensor.numel()
    return lists
