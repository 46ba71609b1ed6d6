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
    parents = tuple(range(-1, len(token_ids) - 1) if evidence.parents is None else evidence.parents)
    rows = (0,) * len(parents) if evidence.context_rows is None else tuple(evidence.context_rows)
    size, device = max(len(start_ids), len(end_ids)) - 1, token_ids.device  # of the part of a marker in the context
    positions = context.lengths.unsqueeze(-1) - torch.arange(size, 0, -1, device=device)  # [B, size]
    tails = torch.where(positions >= 0, context.token_ids.gather(-1, positions.clamp_min(0)), -1)
    known = torch.cat([tails.reshape(-1), token_ids])
    paths, lengths = (to_device(indices, device) for indices in _paths(parents, rows, len(tails), size))
    in_block, in_context = (
        [last_occurrence(text, marker) for marker in (start_ids, end_ids)]
        for text in (Context(known[paths], lengths), context)
    )
    open_before = (in_context[0] > in_context[1])[device_tensor(list(rows), torch.long, device)]
    return torch.where(torch.maximum(*in_block) > size, in_block[0] > in_block[1], open_before)


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


@lru_cache(maxsize=64)
def _paths(parents: tuple[int, ...], rows: tuple[int, ...], num_texts: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices of the tokens before each drafted token, in the texts' tails and then the block: [N, size + depth], [N].

    The second result is their number.
    """
    paths: list[list[int]] = []
    for parent, row in zip(parents, rows, strict=True):
        tail = list(range(row * size, (row + 1) * size))
        paths.append(tail if parent == ROOT else [*paths[parent], num_texts * size + parent])
    lengths = [len(path) for path in paths]
    longest = max(lengths, default=0)
    padded = [path + [0] * (longest - len(path)) for path in paths]
    indices = torch.tensor(padded, dtype=torch.long).reshape(len(paths), longest)
    return indices, torch.tensor(lengths, dtype=torch.long)
