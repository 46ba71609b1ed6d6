"""Conversion of client prompts to token ids, and limits on the length of answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from reprieve.engine.text import REPLACEMENT, is_unicode
from reprieve.errors import SpecError
from reprieve.policies.policy import RequestError
from reprieve.settings import PromptSettings
from reprieve.tasks.prompting import PromptFormat


class Prompts:
    """Prompts and texts of a pair.

    Args:
        tokenizer: tokenizer of the pair.
        max_positions: context length that both models support.
        vocab_size: exclusive upper bound on token ids.
        wrap: formats a chat's only message if the tokenizer has no chat template; None refuses such chats.
        settings: system prompt and thinking of chats that do not set them; needs a chat template.

    Raises:
        SpecError: `settings` needs a chat template, and the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_positions: int,
        vocab_size: int,
        wrap: Callable[[str], str] | None,
        settings: PromptSettings | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_positions = max_positions
        self.vocab_size = vocab_size
        self._wrap = wrap
        self._max_tokens = max_positions - 1
        self._max_characters = _SLACK * max_positions * max(map(len, tokenizer.get_vocab()))
        self._settings = settings or PromptSettings()
        PromptFormat(tokenizer, self._settings)  # refuses what the tokenizer has no template for

    def plain(self, prompt: str | list[int]) -> list[int]:
        """A prompt as token ids.

        Raises:
            RequestError: empty, too long for the context, or a token id out of range.
        """
        if isinstance(prompt, str):
            self._require_text("prompt", prompt)
        token_ids: list[int] = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise RequestError("prompt", "prompt must hold at least one token, got none")
        if len(token_ids) > self._max_tokens:
            raise RequestError("prompt", f"prompt must hold at most {self._max_tokens} tokens, got {len(token_ids)}")
        if bad := [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]:
            raise RequestError("prompt", f"prompt: token ids must be in [0, {self.vocab_size - 1}], got {bad[0]}")
        return list(token_ids)

    def chat(self, messages: Sequence[tuple[str, str]], thinking: bool | None = None) -> list[int]:
        """Return a conversation (roles and texts) as token ids: by the tokenizer's template, else by `wrap`.

        Args:
            thinking: the request's value of the template's `enable_thinking`; None uses the server's.

        Raises:
            RequestError: there is neither a template nor `wrap`, or the messages do not fit the one that is used.
        """
        for _, message in messages:
            self._require_text("messages", message)
        if self.tokenizer.chat_template:
            turns = [{"role": role, "content": text} for role, text in messages]
            settings = PromptSettings(
                chat_template=True,
                system_prompt=None if turns[0]["role"] == "system" else self._settings.system_prompt,
                thinking=self._settings.thinking if thinking is None else "on" if thinking else "off",
            )
            try:
                return self.plain(PromptFormat(self.tokenizer, settings).encode(turns))
            except SpecError as error:
                raise RequestError("messages", f"messages: the chat template refuses them: {error}") from None
        if self._wrap is None:
            raise RequestError("messages", "this model has no chat template; use /v1/completions")
        if len(messages) != 1 or messages[0][0] != "user":
            raise RequestError(
                "messages",
                "messages: this model has no chat template and takes one message with the role user, got the roles "
                + ", ".join(role for role, _ in messages),
            )
        return self.plain(self._wrap(messages[0][1]))

    def room(self, prompts: Sequence[list[int]], requested: int | None, largest: int) -> int:
        """Return the maximum number of new tokens per choice: the requested one, else as many as fit, up to `largest`.

        Raises:
            RequestError: more new tokens than fit or the server allows.
        """
        longest = max(len(prompt) for prompt in prompts)
        left = self.max_positions - longest
        if requested is not None and requested > min(left, largest):
            raise RequestError(
                "max_tokens",
                f"max_tokens must be in [1, {min(left, largest)}] beside a prompt of {longest} tokens (the models read "
                f"{self.max_positions}, this server writes up to {largest}), got {requested}",
            )
        return min(left if requested is None else requested, largest)

    def decode(self, token_ids: list[int]) -> str:
        """Token ids to text, special tokens included."""
        return str(self.tokenizer.decode(token_ids))

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, even if they are part of a character; None if they cannot be determined."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return None
        if byte := _BYTE.fullmatch(token):  # SentencePiece's byte tokens
            return bytes([int(byte[1], 16)])
        if REPLACEMENT not in self.decode([token_id]) or any(character not in _BYTES for character in token):
            return None
        return bytes(_BYTES[character] for character in token)

    def _require_text(self, field: str, text: str) -> None:
        """Refuse a text that is too long, before it is split into tokens, or that has a lone surrogate.

        JSON can contain a lone surrogate, but no tokenizer can encode it.
        """
        if len(text) > self._max_characters:
            most, got = f"{self._max_tokens} tokens", f"{len(text)} characters"
            raise RequestError(field, f"{field} must hold at most {most}, got {got}")
        if not is_unicode(text):
            raise RequestError(field, f"{field} must be valid Unicode, got a text with half of a surrogate pair")

    def visible(self, token_ids: list[int]) -> str:
        """Token ids to text as answers hold it, without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


_SLACK = 4  # times the characters of the longest token: tokenizers may shorten a text before they split it
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies
