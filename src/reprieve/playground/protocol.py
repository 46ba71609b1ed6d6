"""Responses of OpenAI's protocol, whole and streamed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reprieve.engine.text import LONGEST_CHARACTER, REPLACEMENT
from reprieve.types import Generation, Token

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class Texts(Protocol):
    """Token ids to text."""

    def decode(self, token_ids: list[int]) -> str: ...
    def visible(self, token_ids: list[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes | None: ...


@dataclass
class _Cursor:
    """Position that a choice's log-probabilities have reached."""

    num_characters: int = 0
    last: int | None = None  # token
    complete: int | None = None  # the last token that ended a character
    pending: list[int] = field(default_factory=list)  # tokens of an incomplete character


class Replies:
    """Builds the responses to one request.

    Args:
        kind: `completion` or `chat`.
        texts: token ids to text, for logprobs.
        spec: specification of the rule, for the summary.
    """

    def __init__(self, kind: str, request_id: str, model: str, texts: Texts, spec: str, *, provenance: bool) -> None:
        self.chat = kind == "chat"
        self.decode = texts.decode
        self.visible = texts.visible
        self.spec = spec
        self.provenance = provenance
        self._base = {"id": request_id, "created": int(time.time()), "model": model}
        self.token_bytes = texts.token_bytes
        self._cursors: dict[int, _Cursor] = {}  # of each choice

    def whole(
        self, generations: Sequence[Generation], num_prompt_tokens: int, num_logprobs: int | None
    ) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = []
        for index, answer in enumerate(generations):
            choice: dict[str, Any] = {"index": index, "finish_reason": _FINISH[answer.finish_reason]}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            else:
                choice["text"] = answer.text
            choice["logprobs"] = self._logprobs(index, answer.tokens, num_logprobs)
            if self.provenance:
                choice["reprieve"] = {"tokens": [self.token(token) for token in answer.tokens]}
            choices.append(choice)
        return {
            **self._base,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": choices,
            "usage": usage(num_prompt_tokens, generations),
            "reprieve": self.summary(generations),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a streamed chat; None for completions."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self.chat else None

    def piece(self, index: int, token: Token, text: str, num_logprobs: int | None) -> dict[str, Any] | None:
        """Return the chunk of one token; None if there is nothing to send yet."""
        if not text and not self.provenance and num_logprobs is None:
            return None
        delta = {"content": text} if self.chat else text
        chunk = self._chunk(index, delta, logprobs=self._logprobs(index, [token], num_logprobs))
        if self.provenance:
            chunk["choices"][0]["reprieve"] = {"tokens": [self.token(token)]}
        return chunk

    def closing(self, index: int, generation: Generation) -> dict[str, Any]:
        """Return the last chunk of a streamed choice, with the summary of its rounds."""
        chunk = self._chunk(index, {} if self.chat else "", finish_reason=_FINISH[generation.finish_reason])
        return {**chunk, "reprieve": self.summary([generation])}

    def usage(self, num_prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the usage chunk, which ends a stream that was requested with include_usage."""
        return {
            **self._base,
            "object": self._chunk_object,
            "choices": [],
            "usage": usage(num_prompt_tokens, generations),
        }

    def summary(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the rule, the counts of rounds and tokens, and the speed."""
        num_tokens = sum(len(answer.tokens) for answer in generations)
        num_rounds = sum(answer.num_rounds for answer in generations)
        seconds = sum(answer.seconds for answer in generations)
        return {
            "rule": self.spec,
            "num_rounds": num_rounds,
            "num_drafted": sum(answer.num_drafted for answer in generations),
            "num_accepted": sum(answer.num_accepted for answer in generations),
            "num_rescued": sum(answer.num_rescued for answer in generations),
            "tokens_per_round": num_tokens / max(1, num_rounds),
            "tokens_per_second": num_tokens / seconds if seconds else None,
            "seconds": seconds,
        }

    def token(self, token: Token) -> dict[str, Any]:
        """A token's provenance, as the playground shows it."""
        other = next((item for item in token.alternatives if item[0] != token.token_id), None)
        return {
            "token_id": token.token_id,
            "text": self.decode([token.token_id]),
            "provenance": token.provenance.value,
            "risk": _finite(token.risk),
            "logprob": _finite(token.logprob),
            "alternative": None if other is None else {"text": self.decode([other[0]]), "logprob": _finite(other[1])},
        }

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(
        self, index: int, content: Any, *, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self.chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {**self._base, "object": self._chunk_object, "choices": [choice]}

    def _logprobs(self, index: int, tokens: Sequence[Token], num_logprobs: int | None) -> dict[str, Any] | None:
        if num_logprobs is None:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(token, num_logprobs) for token in tokens], "refusal": None}
        cursor = self._cursors.setdefault(index, _Cursor())
        entries = [self._completion_logprob(cursor, token, num_logprobs) for token in tokens]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return (
            dict(zip(names, map(list, zip(*entries, strict=True)), strict=True)) if entries else {n: [] for n in names}
        )

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
        grown = self.visible([*before, *cursor.pending])[len(self.visible(before)) if before else 0 :]
        if not grown.endswith(REPLACEMENT) or len(cursor.pending) >= LONGEST_CHARACTER:  # else half a character
            cursor.num_characters += len(grown)
            cursor.complete, cursor.pending = token.token_id, []
        cursor.last = token.token_id
        return text, _finite(token.logprob), top, offset

    def _text(self, before: int | None, token_id: int) -> str:
        """Return a token's text after another token: decoded alone, some tokenizers drop its leading space."""
        alone = self.decode([token_id])
        if before is None:
            return alone
        known, both = self.decode([before]), self.decode([before, token_id])
        return both[len(known) :] if both.startswith(known) and both[len(known) :].endswith(alone) else alone

    def _chat_logprob(self, token: Token, num_logprobs: int) -> dict[str, Any]:
        def entry(token_id: int, value: float | None) -> dict[str, Any]:
            text = self.decode([token_id])
            own = self.token_bytes(token_id)
            return {"token": text, "logprob": _finite(value), "bytes": list(text.encode() if own is None else own)}

        top = [entry(token_id, value) for token_id, value in token.alternatives[:num_logprobs]]
        return {**entry(token.token_id, token.logprob), "top_logprobs": top}


def usage(num_prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, int]:
    """Tokens read and written."""
    num_new = sum(len(answer.tokens) for answer in generations)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new,
        "total_tokens": num_prompt_tokens + num_new,
    }


def error_body(message: str, *, kind: str, param: str | None = None, code: int | str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
