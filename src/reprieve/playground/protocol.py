"""Responses of OpenAI's protocol, whole and streamed."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reprieve.engine.text import LONGEST_CHARACTER, REPLACEMENT
from reprieve.playground.prompts import Prompts
from reprieve.types import DecodingStats, Generation, Token


@dataclass
class _Cursor:
    """Position that a choice's log-probabilities have reached."""

    num_characters: int = 0
    last: int | None = None  # token
    complete: int | None = None  # the last token that ended a character
    pending: list[int] = field(default_factory=list)  # tokens of an incomplete character


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
        self._cursors: dict[int, _Cursor] = {}  # of each choice

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
        return {
            "rule": self.spec,
            "num_rounds": total.num_rounds,
            "num_drafted": total.num_drafted,
            "num_accepted": total.num_accepted,
            "num_rescued": total.num_rescued,
            "tokens_per_round": total.tokens_per_round,
            "tokens_per_second": total.num_tokens / total.seconds if total.seconds else None,
            "seconds": total.seconds,
        }

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
        cursor = self._cursors.setdefault(index, _Cursor())
        entries = [self._completion_logprob(cursor, token, self.num_logprobs) for token in tokens]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[column] for entry in entries] for column, name in enumerate(names)}

    def _completion_logprob(
        self, cursor: _Cursor, token: Token, num_logprobs: int
    ) -> tuple[str, float | None, dict[str, float | None], int]:
        """Return a token's text, log-probability, alternatives, and character offset in the answer."""
        text = self._text(cursor.last, token.token_id)
        top: dict[str, float | None] = {}
        for token_id, value in token.alternatives[:num_logprobs]:
            name = self._text(cursor.last, token_id)
            top[name if name not in top else f"token_id:{token_id}"] = _finite(value)  # two tokens with one text
        offset = cursor.num_characters
        cursor.pending.append(token.token_id)
        before = [] if cursor.complete is None else [cursor.complete]
        grown = self.texts.visible([*before, *cursor.pending])[len(self.texts.visible(before)) if before else 0 :]
        if not grown.endswith(REPLACEMENT) or len(cursor.pending) >= LONGEST_CHARACTER:  # else half a character
            cursor.num_characters += len(grown)
            cursor.complete, cursor.pending = token.token_id, []
        cursor.last = token.token_id
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


def error_body(message: str, *, kind: str, param: str | None = None, code: int | str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
