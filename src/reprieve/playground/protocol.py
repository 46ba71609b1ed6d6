"""OpenAI's protocol: a client's prompts as token ids, and responses, whole and streamed."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from reprieve.engine.text import REPLACEMENT, TextStream, is_unicode
from reprieve.errors import SpecError
from reprieve.policies.policy import RequestError
from reprieve.settings import PromptSettings
from reprieve.tasks.prompting import PromptFormat
from reprieve.types import DecodingStats, Generation, Token

_SLACK = 4  # times the characters of the longest token: tokenizers may shorten a text before they split it
_SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies


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
        if byte := _SENTENCEPIECE_BYTE.fullmatch(token):  # SentencePiece's byte tokens
            return bytes([int(byte[1], 16)])
        if REPLACEMENT not in self.decode([token_id]) or any(character not in _BYTE_LEVEL for character in token):
            return None
        return bytes(_BYTE_LEVEL[character] for character in token)

    def _require_text(self, field: str, text: str) -> None:
        """Refuse a text that is too long, before it is split into tokens, or that has a lone surrogate.

        JSON can contain a lone surrogate, but no tokenizer can encode it.
        """
        if len(text) > self._max_characters:
            most, got = f"{self._max_tokens} tokens", f"{len(text)} characters"
            raise RequestError(field, f"{field} must hold at most {most}, got {got}")
        if not is_unicode(text):
            raise RequestError(field, f"{field} must be valid Unicode, got a text with half of a surrogate pair")


@dataclass
class Replies:
    """Builds the responses to one request.

    Args:
        chat: a chat completion, instead of a completion.
        texts: token ids to text.
        spec: specification of the rule, for the summary.
        num_logprobs: likely tokens to report for each token; None for no log-probabilities.
        provenance: report where each token comes from.
    """

    chat: bool
    model: str
    texts: Prompts
    spec: str
    num_prompt_tokens: int
    num_logprobs: int | None
    provenance: bool

    def __post_init__(self) -> None:
        request_id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._base = {"id": request_id, "created": int(time.time()), "model": self.model}
        self._streams: dict[int, TextStream] = {}  # of each choice
        self._last: dict[int, int] = {}  # token of each choice

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = []
        for index, answer in enumerate(generations):
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            content: dict[str, Any] = {"message": message} if self.chat else {"text": answer.text}
            choices.append(self._choice(index, content, answer.tokens, answer.finish_reason))
        return {
            **self._base,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": choices,
            "usage": self._usage(generations),
            "reprieve": self.summary(generations),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a streamed chat; None for completions."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self.chat else None

    def piece(self, index: int, token: Token, text: str) -> dict[str, Any] | None:
        """Return the chunk of one token; None if there is nothing to send yet."""
        if not text and not self.provenance and self.num_logprobs is None:
            return None
        return self._chunk(index, {"content": text} if self.chat else text, [token])

    def closing(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return the last chunk of a streamed choice, with the summary of its rounds."""
        chunk = self._chunk(index, {} if self.chat else "", finish_reason=generation.finish_reason)
        return {**chunk, "reprieve": self.summary([generation])}

    def usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the usage chunk, which ends a stream that was requested with include_usage."""
        return {**self._base, "object": self._chunk_object, "choices": [], "usage": self._usage(generations)}

    def summary(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the rule, the counts of rounds and tokens, and the speed."""
        total = DecodingStats.total(generations)
        names = ("num_rounds", "num_drafted", "num_accepted", "num_rescued", "tokens_per_round", "seconds")
        speed = total.num_tokens / total.seconds if total.seconds else None
        return {"rule": self.spec, **{name: getattr(total, name) for name in names}, "tokens_per_second": speed}

    def _usage(self, generations: Sequence[Generation]) -> dict[str, int]:
        num_new = DecodingStats.total(generations).num_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": self.num_prompt_tokens + num_new,
        }

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(
        self, index: int, content: Any, tokens: Sequence[Token] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = self._choice(index, {"delta" if self.chat else "text": content}, tokens, finish_reason)
        return {**self._base, "object": self._chunk_object, "choices": [choice]}

    def _choice(
        self, index: int, content: dict[str, Any], tokens: Sequence[Token] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        """Return a choice, or a part of one; without tokens, it has no log-probabilities and no provenance."""
        reason = "stop" if finish_reason == "eos" else finish_reason
        choice: dict[str, Any] = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        if tokens is not None:
            choice["logprobs"] = self._logprobs(index, tokens)
            if self.provenance:
                choice["reprieve"] = {"tokens": [self._provenance(token) for token in tokens]}
        return choice

    def _provenance(self, token: Token) -> dict[str, Any]:
        """A token's provenance, as the playground shows it."""
        other = next((item for item in token.alternatives if item[0] != token.token_id), None)
        return {
            "token_id": token.token_id,
            "text": self.texts.decode([token.token_id]),
            "provenance": token.provenance.value,
            "risk": _finite(token.risk),
            "logprob": _finite(token.logprob),
            "alternative": other and {"text": self.texts.decode([other[0]]), "logprob": _finite(other[1])},
        }

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(token, self.num_logprobs) for token in tokens], "refusal": None}
        entries = [self._completion_logprob(index, token, self.num_logprobs) for token in tokens]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[column] for entry in entries] for column, name in enumerate(names)}

    def _completion_logprob(
        self, index: int, token: Token, num_logprobs: int
    ) -> tuple[str, float | None, dict[str, float | None], int]:
        """Return a token's text, log-probability, alternatives, and character offset in the answer."""
        stream = self._streams.setdefault(index, TextStream(self.texts.tokenizer))
        before = self._last.get(index)
        text = self._text(before, token.token_id)
        top: dict[str, float | None] = {}
        for token_id, value in token.alternatives[:num_logprobs]:
            name = self._text(before, token_id)
            top[name if name not in top else f"token_id:{token_id}"] = _finite(value)  # two tokens with one text
        offset = len(stream.text)
        stream.push(token.token_id)
        self._last[index] = token.token_id
        return text, _finite(token.logprob), top, offset

    def _text(self, before: int | None, token_id: int) -> str:
        """Return a token's text after another token: decoded alone, some tokenizers drop its leading space."""
        alone = self.texts.decode([token_id])
        if before is None:
            return alone
        known, both = self.texts.decode([before]), self.texts.decode([before, token_id])
        return both[len(known) :] if both.startswith(known) and both[len(known) :].endswith(alone) else alone

    def _chat_logprob(self, token: Token, num_logprobs: int) -> dict[str, Any]:
        def entry(token_id: int, value: float | None) -> dict[str, Any]:
            text = self.texts.decode([token_id])
            own = self.texts.token_bytes(token_id)
            return {"token": text, "logprob": _finite(value), "bytes": list(text.encode() if own is None else own)}

        top = [entry(token_id, value) for token_id, value in token.alternatives[:num_logprobs]]
        return {**entry(token.token_id, token.logprob), "top_logprobs": top}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
