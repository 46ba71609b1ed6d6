"""Search for markers in a text and in the drafted tokens that continue it, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from reprieve.transfers import spread, to_device
from reprieve.types import ROOT, Context, Evidence


def span_is_open(evidence: Evidence, start_ids: Sequence[int], end_ids: Sequence[int]) -> Tensor:
    """Return whether the last marker before each drafted token is `start`: [N], bool.

    The text before a token is its context and the drafted tokens that it follows.
    """
    context, token_ids = evidence.context, evidence.token_ids
    assert context is not None, "a span needs the text before the block: Need.CONTEXT"
    parents = range(-1, len(token_ids) - 1) if evidence.parents is None else evidence.parents
    rows = [0] * len(parents) if evidence.context_rows is None else evidence.context_rows
    open_before = last_occurrence(context, start_ids) > last_occurrence(context, end_ids)  # [B]
    opens, closes = (_ends_with(evidence, marker, parents, rows) for marker in (start_ids, end_ids))
    # +1 where the token completes `start`, -1 where it completes `end`; a last 0 stands for no token.
    changes = torch.cat([(opens & ~closes).long() - closes.long(), token_ids.new_zeros(1)])
    before = changes[to_device(_ancestors(tuple(parents)), token_ids.device)]  # [N, depth], the nearest first
    nearest = (before != 0).long().argmax(-1, keepdim=True)
    change = before.gather(-1, nearest).squeeze(-1)
    return torch.where(change == 0, open_before[spread(list(rows), torch.long, token_ids.device)], change > 0)


def last_occurrence(context: Context, marker: Sequence[int]) -> Tensor:
    """Index just past the marker's last occurrence in each text, -1 where there is none: [B]."""
    size, length = len(marker), context.token_ids.shape[-1]
    if length < size:
        return torch.full_like(context.lengths, -1)
    device = context.lengths.device
    wanted = spread(list(marker), torch.long, device)
    found = (context.token_ids.unfold(-1, size, 1) == wanted).all(-1)  # [B, T - size + 1]
    ends = torch.arange(size, length + 1, device=device)
    return torch.where(found & (ends <= context.lengths.unsqueeze(-1)), ends, -1).amax(-1)


def _ends_with(evidence: Evidence, marker: Sequence[int], parents: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Return whether the text up to each drafted token ends with the marker: [N], bool."""
    context, token_ids = evidence.context, evidence.token_ids
    assert context is not None
    size, device = len(marker), token_ids.device
    positions = context.lengths.unsqueeze(-1) - torch.arange(size, 0, -1, device=device)  # [B, size]
    tails = torch.where(positions >= 0, context.token_ids.gather(-1, positions.clamp_min(0)), -1)
    known = torch.cat([tails.reshape(-1), token_ids])
    windows = known[to_device(_windows(tuple(parents), tuple(rows), len(tails), size), device)]  # [N, size]
    return (windows == spread(list(marker), torch.long, device)).all(-1)


@lru_cache(maxsize=64)
def _windows(parents: tuple[int, ...], rows: tuple[int, ...], num_texts: int, size: int) -> Tensor:
    """Indices of the last `size` tokens up to each drafted token, in the texts' tails and then the block: [N, size]."""
    first = num_texts * size  # of the drafted tokens
    windows: list[list[int]] = []
    for node, (parent, row) in enumerate(zip(parents, rows, strict=True)):
        before = range(row * size, (row + 1) * size) if parent == ROOT else windows[parent]
        windows.append([*before[1:], first + node])
    return torch.tensor(windows, dtype=torch.long).reshape(-1, size)


@lru_cache(maxsize=64)
def _ancestors(parents: tuple[int, ...]) -> Tensor:
    """The drafted tokens that each token follows, the nearest first; -1 where there are no more: [N, depth]."""
    paths: list[list[int]] = []
    for parent in parents:
        paths.append([] if parent == ROOT else [parent, *paths[parent]])
    depth = max((len(path) for path in paths), default=0) + 1
    return torch.tensor([path + [-1] * (depth - len(path)) for path in paths], dtype=torch.long).reshape(-1, depth)
