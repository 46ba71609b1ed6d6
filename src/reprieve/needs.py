"""Inputs of rules besides the drafted tokens and the target's logits."""

from __future__ import annotations

from enum import StrEnum


class Need(StrEnum):
    """Fields of `Evidence` that are expensive; the engine fills in only those that a rule declares."""

    DRAFT_PROBS = "draft_probs"
    DRAFT_HIDDEN = "draft_hidden"
    NODE_HIDDEN = "node_hidden"
    PARENT_HIDDEN = "parent_hidden"
    EMBEDDINGS = "embeddings"  # `token_embeddings` and `top_embeddings`
    NOISE = "noise"
    ADVICE = "advice"
    CONTEXT = "context"
    ANSWER_POSITIONS = "answer_positions"
