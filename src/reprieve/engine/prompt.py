"""Prompts as token ids: from text, from ids, and from the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from reprieve.errors import SpecError, require_whole


class Tokenizer(Protocol):
    """The part of a tokenizer that the engine needs."""

    eos_token_id: int | None

    def __len__(self) -> int: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


def token_ids_of(tokenizer: Tokenizer, prompt: str | Sequence[int], num_token_ids: int) -> list[int]:
    """Return a prompt as token ids.

    Args:
        num_token_ids: exclusive upper bound of ids.

    Raises:
        SpecError: neither text nor ids, no tokens, or an id out of range.
    """
    if not isinstance(prompt, str | Sequence):
        raise SpecError(f"prompt must be a text or token ids, got {prompt!r}")
    token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not token_ids:
        raise SpecError("prompt must hold at least one token, got none")
    if not isinstance(prompt, str):
        for token_id in token_ids:
            require_whole("a token id of the prompt", token_id, 0, num_token_ids - 1)
    return token_ids


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return a chat as token ids, in the tokenizer's chat template, up to the beginning of the answer.

    Raises:
        SpecError: no messages, a message that is not a role and a content, no chat template, or a template that fails.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise SpecError(f"messages must be a list such as [{{'role': 'user', 'content': 'Hello'}}], got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise SpecError(f"each message must have a role and a content, got {message!r}")
    if not getattr(tokenizer, "chat_template", None):
        raise SpecError("messages= requires a tokenizer with a chat template, this one has none: pass a prompt")
    return encode_chat(tokenizer, render_chat(tokenizer, messages))


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
    """Return a chat rendered with the tokenizer's chat template, as text; the template writes the special tokens.

    Args:
        options: variables of the template, such as `enable_thinking`.

    Raises:
        SpecError: the template fails.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options))
    except Exception as error:  # templates can raise anything, often for a system message
        raise SpecError(f"the tokenizer's chat template failed: {' '.join(str(error).split())}") from None


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a rendered chat."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
