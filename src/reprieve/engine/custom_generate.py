"""Reprieve inside plain transformers: `model.generate(..., custom_generate=reprieve.custom_generate, ...)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from reprieve.engine.pair import Pair
from reprieve.engine.text import OnToken
from reprieve.errors import PairError, SpecError
from reprieve.rules import Rule, parse_rule
from reprieve.rules.learned import HeadRule
from reprieve.settings import AUTO, NumDraftTokens, SamplingParams


class _IdsOnly:
    """Placeholder tokenizer, for rules and stop conditions that do not read text."""

    eos_token_id: int | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise SpecError("this rule reads tokens' text: pass text_tokenizer= to generate")


# Supported settings, and settings that do not change the generated tokens here.
_TAKEN = ("do_sample", "temperature", "top_p", "top_k", "max_length", "max_new_tokens", "eos_token_id", "stop_strings")
_WITHOUT_EFFECT = (
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config", "is_assistant", "early_stopping"),
    *("length_penalty", "remove_invalid_values", "speculation_type", "target_lookbehind", "assistant_lookbehind"),
    *("assistant_confidence_threshold", "assistant_early_exit", "num_assistant_tokens", "max_matching_ngram_size"),
    *("num_assistant_tokens_schedule", "prompt_lookup_num_tokens"),
)
# All other settings would change the answer and are refused, unless they are unset or have their neutral value: 1 for
# these, 0 or False for the rest.
_NEUTRAL_AT_ONE = (
    *("num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty", "encoder_repetition_penalty"),
    *("typical_p", "guidance_scale"),
)


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,  # [1, prompt length]
    *,
    draft_model: PreTrainedModel | None = None,
    rule: str | Rule = "lossless",
    num_draft_tokens: NumDraftTokens = AUTO,
    generation_config: GenerationConfig | None = None,
    text_tokenizer: Any = None,
    on_token: OnToken | None = None,
    seed: int | None = None,
    stop: str | tuple[str, ...] | list[str] = (),
    **extra: Any,
) -> Tensor:  # [1, prompt length + new tokens]
    """Speculative decoding with a relaxed rule, as a `custom_generate` callable.

    `max_new_tokens`, `max_length`, `do_sample`, `temperature`, `top_p`, `top_k`, `eos_token_id` and `stop_strings` are
    taken from the generation configuration. Without a `draft_model`, n-grams of the text itself are proposed.

    Args:
        draft_model: proposes tokens; must share the target's tokenizer. transformers does not pass on its
            `assistant_model` argument.
        text_tokenizer: required for stop strings, for rules that read tokens' text, and for trained heads; transformers
            does not pass on its `tokenizer` argument.
        on_token: called with each token and the text that became final with it; transformers does not pass a `streamer`
            to callables.
        stop: texts that end the answer. Use it instead of `stop_strings`, for which transformers requires a `tokenizer`
            that it does not pass to callables.
        seed: of the sampling; drawn from torch's global generator when None.

    Raises:
        SpecError: more than one prompt, a generation setting the engine does not have, or a rule
            that cannot be read.
        PairError: the draft's vocabulary differs from the target's, or the rule's head was made for other models.
        ContextOverflowError: prompt and new tokens exceed the model's positions.
    """
    config = generation_config or model.generation_config
    parsed = parse_rule(rule) if isinstance(rule, str) else rule
    _refuse_unsupported(input_ids, config, extra)
    has_head = any(isinstance(leaf, HeadRule) for leaf in parsed.leaves)
    if text_tokenizer is None and (parsed.traits.reads_text or stop or config.stop_strings or has_head):
        raise SpecError(f"rule {parsed.spec}, or a stop string, needs the tokenizer: pass text_tokenizer= to generate")
    vocab_size = model.get_output_embeddings().weight.shape[0]
    tokenizer = _IdsOnly(vocab_size) if text_tokenizer is None else text_tokenizer
    if draft_model is not None:
        num_drafted = draft_model.config.get_text_config().vocab_size
        if num_drafted < len(tokenizer):
            raise PairError(
                f"the draft knows {num_drafted} tokens, the target {len(tokenizer)}: they must share a tokenizer "
                "(if only padding differs, pass text_tokenizer=)"
            )
    draft_name = None if draft_model is None else str(draft_model.name_or_path)
    pair = Pair(model, draft_model, tokenizer, str(model.name_or_path), draft_name)
    drafter = "ngram" if draft_model is None else "draft"
    decoder = pair.decoder(parsed, num_draft_tokens=num_draft_tokens, drafter=drafter)
    seed = int(torch.randint(2**31, ())) if seed is None else seed
    generation = decoder.generate(
        input_ids[0].tolist(), _params(config, input_ids.shape[1], seed, stop), on_token=on_token
    )
    return torch.cat([input_ids, torch.tensor([generation.token_ids], device=input_ids.device)], dim=1)


def _refuse_unsupported(input_ids: Tensor, config: GenerationConfig, extra: dict[str, Any]) -> None:
    others = [name for name in GenerationConfig().to_dict() if name not in (*_TAKEN, *_WITHOUT_EFFECT)]
    for name in others:
        value = getattr(config, name, None)
        neutral = type(value)(name in _NEUTRAL_AT_ONE) if isinstance(value, int | float) else None
        if value not in (None, neutral):
            raise SpecError(f"generation setting {name} must be {neutral} with custom_generate, got {value!r}")
    if input_ids.shape[0] != 1:
        raise SpecError(f"batch size must be 1, got {input_ids.shape[0]}")
    mask = extra.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise SpecError("attention_mask must be all ones: the prompt must not be padded")
    for kind in ("logits_processor", "stopping_criteria"):
        for item in extra.get(kind) or ():
            if not type(item).__module__.startswith("transformers."):
                raise SpecError(f"a custom {kind} is not supported, got {type(item).__name__}")


def _params(
    config: GenerationConfig, prompt_length: int, seed: int, stop: str | tuple[str, ...] | list[str]
) -> SamplingParams:
    max_new_tokens = config.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = (config.max_length or 20) - prompt_length
    stop = stop or config.stop_strings or ()
    eos = config.eos_token_id
    sampling: dict[str, Any] = {}
    if config.do_sample:
        sampling = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": config.top_k or 0,
        }
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        **sampling,
    )
