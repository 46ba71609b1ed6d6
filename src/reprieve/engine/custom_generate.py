"""Reprieve from plain transformers: `model.generate(..., custom_generate=reprieve.custom_generate, ...)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from reprieve.drafters import DraftModelDrafter, NgramDrafter
from reprieve.drafters.base import Drafter
from reprieve.engine.decoder import SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import SamplingParams
from reprieve.rules import Rule, parse_rule


class _IdsOnly:
    """Stands in for a tokenizer when none is given: enough for rules and stops that read no text."""

    eos_token_id: int | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise SpecError("this rule reads tokens' text: pass tokenizer= to generate")


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,  # [1, prompt length]
    *,
    draft_model: PreTrainedModel | None = None,
    rule: str | Rule = "lossless",
    num_draft_tokens: int = 16,
    generation_config: GenerationConfig | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    **unused: Any,
) -> Tensor:  # [1, prompt length + new tokens]
    """Speculative decoding with a relaxed rule, as a `custom_generate` callable.

    `max_new_tokens`, `max_length`, `do_sample`, `temperature`, `top_p`, `top_k` and `stop_strings` are taken from the
    generation configuration. Without a `draft_model`, n-grams of the text itself are proposed.

    Raises:
        SpecError: more than one prompt, beams, or a rule that cannot be read.
        ContextOverflowError: prompt and new tokens exceed the model's positions.
    """
    config = generation_config or model.generation_config
    if input_ids.shape[0] != 1:
        raise SpecError(f"batch size must be 1, got {input_ids.shape[0]}")
    if (config.num_beams or 1) != 1 or (config.num_return_sequences or 1) != 1:
        raise SpecError("num_beams and num_return_sequences must be 1")
    vocab_size = model.get_output_embeddings().weight.shape[0]
    drafter: Drafter = NgramDrafter(model.device)
    if draft_model is not None:
        vocab_size = min(vocab_size, draft_model.get_output_embeddings().weight.shape[0])
        drafter = DraftModelDrafter(CachedModel(draft_model, vocab_size=vocab_size), model.device)
    decoder = SpeculativeDecoder(
        CachedModel(model, vocab_size=vocab_size),
        drafter,
        tokenizer if tokenizer is not None else _IdsOnly(vocab_size),
        rule=parse_rule(rule) if isinstance(rule, str) else rule,
        num_draft_tokens=num_draft_tokens,
    )
    made = decoder.generate(input_ids[0].tolist(), _params(config, input_ids.shape[1], seed))
    return torch.cat([input_ids, torch.tensor([made.token_ids], device=input_ids.device)], dim=1)


def _params(config: GenerationConfig, prompt_length: int, seed: int) -> SamplingParams:
    max_new_tokens = config.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = (config.max_length or 20) - prompt_length
    stop = config.stop_strings or ()
    sampling: dict[str, Any] = {}
    if config.do_sample:
        sampling = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": config.top_k or 0,
        }
    return SamplingParams(
        max_new_tokens=max_new_tokens, seed=seed, stop=(stop,) if isinstance(stop, str) else tuple(stop), **sampling
    )
