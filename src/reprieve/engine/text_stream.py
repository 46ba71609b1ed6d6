"""Tokens to text as they come: incomplete characters wait, stop texts end the answer."""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "\ufffd"


class Decodes(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Decodes incrementally; `push` returns the text that has become certain.

    Text that could be the beginning of a stop text is held back until it is known not to be one. Only a window of the
    last tokens is decoded each time, with the ones before it as context, since tokenizers join words by context.
    """

    def __init__(self, tokenizer: Decodes, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""  # without the stop text
        self.stopped = False
        self._ids: list[int] = []
        self._context = 0  # the window's first token
        self._read = 0  # tokens whose text is in `text`
        self._released = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns new text, often one word, sometimes none. After a stop nothing more comes."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        self._take(final=False)
        return self._release(len(self.text) if self.stopped else self._certain())

    def finish(self) -> str:
        """The text still held back."""
        if not self.stopped:
            self._take(final=True)
        return self._release(len(self.text))

    def _take(self, *, final: bool) -> None:
        known = self._decode(self._ids[self._context : self._read])
        window = self._decode(self._ids[self._context :])
        if window.endswith(_REPLACEMENT) and not final:
            return  # half a character
        searched = max(0, len(self.text) - max(map(len, self.stop), default=0))
        self.text += window[len(known) :]
        self._context, self._read = self._read, len(self._ids)
        ends = [at for stop in self.stop if (at := self.text.find(stop, searched)) >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _certain(self) -> int:
        """Length of the text that no stop text can still take back."""
        end = len(self.text)
        held = [size for stop in self.stop for size in range(1, len(stop)) if self.text.endswith(stop[:size])]
        return end - max(held, default=0)

    def _release(self, end: int) -> str:
        new = self.text[self._released : end]
        self._released = max(self._released, end)
        return new
