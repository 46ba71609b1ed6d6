"""Spans of a text, such as thinking: the models' markers for them, and whether one is open at a drafted token.

Markers are given as two texts, or by `thinking` or `tool_calls`, whose markers are read from the model's tokenizer.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.transfers import device_tensor, to_device
from reprieve.types import ROOT, Context, Evidence, Tokenizer

_GPT_OSS = ("<|channel|>analysis<|message|>", "<|end|>")
# Markers by span, in the order in which a tokenizer is searched for them: those of one model family come before
# `<think>`. The start of gpt-oss is not one token, so `_SIGNS` names the tokens that give its format away.
MODEL_SPANS = {
    "thinking": (
        _GPT_OSS,
        ("<|channel>", "<channel|>"),  # Gemma 4
        ("<mm:think>", "</mm:think>"),
        ("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
        ("<ifm|think>", "</ifm|think>"),
        ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        ("<|content_thinking|>", "<|end_message|>"),  # Inkling
        ("<think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("◁think▷", "◁/think▷"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "tool_calls": (
        ("<tool_call>", "</tool_call>"),
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
}
_SIGNS = {_GPT_OSS: ("<|channel|>", "<|message|>", "<|end|>")}


def model_markers(span: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the markers of `thinking` or `tool_calls` that a tokenizer has as tokens.

    Markers that a tokenizer would cut into pieces do not count: the pieces depend on the text around them, and an end
    marker that is not recognised would leave the span open.

    Raises:
        SpecError: the tokenizer has none of them.
    """
    for markers in MODEL_SPANS[span]:
        if all(_is_token(text, tokenizer) for text in _SIGNS.get(markers, markers)):
            return markers
    known = ", ".join(f"{start} {end}" for start, end in MODEL_SPANS[span])
    raise SpecError(
        f"span {span}: the tokenizer has no tokens for it (looked for {known}); name the markers with start= and end=, "
        "or serve the rule without a span"
    )


def _is_token(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether a text is one token, and not the token for unknown text."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return len(token_ids) == 1 and tokenizer.decode(list(token_ids)).strip() == text


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
    return torch.where(change == 0, open_before[device_tensor(list(rows), torch.long, token_ids.device)], change > 0)


def last_occurrence(context: Context, marker: Sequence[int]) -> Tensor:
    """Index just past the marker's last occurrence in each text, -1 where there is none: [B]."""
    size, length = len(marker), context.token_ids.shape[-1]
    if length < size:
        return torch.full_like(context.lengths, -1)
    device = context.lengths.device
    wanted = device_tensor(list(marker), torch.long, device)
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
    return (windows == device_tensor(list(marker), torch.long, device)).all(-1)


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
