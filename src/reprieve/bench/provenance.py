"""Provenance of each character of an answer: from the target, or drafted."""

from __future__ import annotations

from collections.abc import Sequence

from reprieve.engine.text import Decodes, TextStream
from reprieve.types import Provenance, Token

# As records hold it: t, the target's own; m, drafted and matched; r, drafted and rescued.
CODES = {Provenance.TARGET: "t", Provenance.MATCHED: "m", Provenance.RESCUED: "r"}
Span = tuple[int, str]  # number of characters, code


def provenance_spans(tokens: Sequence[Token], tokenizer: Decodes, stop: tuple[str, ...] = ()) -> list[Span]:
    """Return the answer's text as spans of equal provenance; the lengths add up to the text's length.

    A character made of several tokens belongs to the last of them.
    """
    stream = TextStream(tokenizer, stop)
    spans: list[Span] = []
    for number, token in enumerate(tokens):
        before = len(stream.text)
        stream.push(token.token_id)
        if number == len(tokens) - 1:
            stream.finish()
        code, grown = CODES[token.provenance], len(stream.text) - before
        if spans and (spans[-1][1] == code or grown < 0):
            spans[-1] = (spans[-1][0] + grown, spans[-1][1])
        elif grown:
            spans.append((grown, code))
    return [span for span in spans if span[0] > 0]
