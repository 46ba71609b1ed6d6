"""Tokens to text as they come: incomplete characters wait, stop texts end the answer."""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "\ufffd"


class Decodes(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Decodes incrementally; `push` returns the text that has become certain.

    Text that could be the beginning of a stop text is held back until it is known not to be one.
    """

    def __init__(self, tokenizer: Decodes, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""  # without the stop text
        self.stopped = False
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns new text, often one word, sometimes none. After a stop nothing more comes."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        self.text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        for stop in self.stop:
            # A stop can only have appeared in what is new; the text before was searched already.
            at = self.text.find(stop, max(0, self._emitted - len(stop)))
            if at >= 0:
                self.text, self.stopped = self.text[:at], True
        return self._release(len(self.text) if self.stopped else self._certain())

    def finish(self) -> str:
        """The text still held back."""
        return self._release(len(self.text))

    def _certain(self) -> int:
        end = len(self.text.rstrip(_REPLACEMENT))
        for stop in self.stop:
            for size in range(min(len(stop) - 1, end), 0, -1):
                if self.text.endswith(stop[:size], 0, end):
                    end -= size
                    break
        return end

    def _release(self, end: int) -> str:
        new = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new
