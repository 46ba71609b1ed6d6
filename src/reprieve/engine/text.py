"""Text to tokens and back: prompts and chats as ids, incremental decoding, the state of an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from reprieve.errors import SpecError, require_whole
from reprieve.settings import SamplingParams
from reprieve.types import Generation, Provenance, Token, Tokenizer

REPLACEMENT = "\ufffd"  # decoded from bytes that do not form a character
_LONGEST_CHARACTER = 8  # tokens; longer runs are invalid bytes
OnToken = Callable[[Token, str], None]  # a committed token and the text that became final with it


def token_ids_of(tokenizer: Tokenizer, prompt: str | Sequence[int], num_token_ids: int) -> list[int]:
    """Return a prompt as token ids.

    Args:
        num_token_ids: exclusive upper bound of ids.

    Raises:
        SpecError: neither text nor ids, no tokens, or an id out of range.
    """
    if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
        raise SpecError(f"prompt must be a text or token ids, got {prompt!r}")
    if isinstance(prompt, str) and not is_unicode(prompt):
        raise SpecError("prompt must be valid Unicode, got a text with half of a surrogate pair")
    token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not token_ids:
        raise SpecError("prompt must hold at least one token, got none")
    if not isinstance(prompt, str):
        for token_id in token_ids:
            require_whole("a token id of the prompt", token_id, 0, num_token_ids - 1)
    return token_ids


def is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return a tokenizer's special tokens, by text: decoded answers leave them out."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {token.content: token_id for token_id, token in added.items() if token.special}


def text_pieces(tokenizer: Tokenizer, stop: tuple[str, ...], token_ids: list[int]) -> list[str]:
    """Return the text that became final with each token of a whole answer; a stop text is left out."""
    stream = TextStream(tokenizer, stop)
    pieces = [stream.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += stream.finish()
    return pieces


class TextStream:
    """Incremental decoder; `push` returns the text that has become final.

    Text that could be the beginning of a stop text is held back until it is ruled out. Each step decodes only a window
    of the last tokens, with the previous ones as context, because a token's text can depend on them.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self._stops = stop
        self.text = ""  # without the stop text
        self.stopped = False
        self._ids: list[int] = []
        self._context = 0  # the window's first token
        self._read = 0  # tokens whose text is in `text`
        self._released = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final: often one word, sometimes none; none after a stop text."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        self._take(final=False)
        return self._release(len(self.text) if self.stopped else self._certain())

    def finish(self) -> str:
        """Return the text still held back."""
        if not self.stopped:
            self._take(final=True)
        return self._release(len(self.text))

    def _take(self, *, final: bool) -> None:
        known = self._decode(self._ids[self._context : self._read])
        window = self._decode(self._ids[self._context :])
        if window.endswith(REPLACEMENT) and not final and len(self._ids) - self._read < _LONGEST_CHARACTER:
            return  # incomplete character
        new = window[len(known) :]
        self._context, self._read = self._read, len(self._ids)
        before = len(self.text)
        self.text += new
        found = [self.text.find(stop, max(0, before + 1 - len(stop))) for stop in self._stops]
        if starts := [start for start in found if start >= 0]:
            self.text, self.stopped = self.text[: min(starts)], True

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _certain(self) -> int:
        """Return the length of the text that no stop text can still remove."""
        return min((self._begins(stop) for stop in self._stops), default=len(self.text))

    def _begins(self, stop: str) -> int:
        """Return where a stop text could begin at the end of the text; the text's length if nowhere."""
        start = self.text.find(stop[0], max(0, len(self.text) + 1 - len(stop)))
        while start >= 0 and not stop.startswith(self.text[start:]):
            start = self.text.find(stop[0], start + 1)
        return len(self.text) if start < 0 else start

    def _release(self, end: int) -> str:
        new = self.text[self._released : end]
        self._released = max(self._released, end)
        return new


class Answer:
    """State of one answer during decoding: committed tokens, their text, finish reason.

    Args:
        eos_ids: tokens that end a text, unless the parameters say otherwise.
        on_token: called with each committed token and the text that became final with it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        params: SamplingParams,
        eos_ids: Collection[int],
        on_token: OnToken | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.tokens: list[Token] = []
        self.round_lengths: list[int] = []
        self.finish_reason: str | None = None
        self._num_drafted = self._num_pruned = 0
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, params.stop)
        self._on_token = on_token
        ends = eos_ids if params.eos_token_ids is None else params.eos_token_ids
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(ends)
        special = special_tokens(tokenizer) if params.stop else {}
        self._stop_ids = {special[text] for text in params.stop if text in special}
        self._streams = on_token is not None or bool(params.stop)  # text is needed token by token

    @property
    def num_left(self) -> int:
        return self.params.max_new_tokens - len(self.tokens)

    def take_round(self, tokens: Sequence[Token], num_drafted: int, num_pruned: int = 0) -> bool:
        """Commit a round's tokens, up to the one that ends the answer; return False once it has ended."""
        self._num_drafted += num_drafted
        self._num_pruned += num_pruned
        first = len(self.tokens)
        for token in tokens:
            if not self._take(token):
                break
        self.round_lengths.append(len(self.tokens) - first)
        return self.finish_reason is None

    def _take(self, token: Token) -> bool:
        """Commit one token; return False once the answer has ended."""
        self.tokens.append(token)
        text = self._stream.push(token.token_id) if self._streams else ""
        if token.token_id in self._stop_ids:
            self.finish_reason = "stop"
        elif token.token_id in self._eos_ids:
            self.finish_reason = "eos"
        elif self._stream.stopped:
            self.finish_reason = "stop"
        elif self.num_left == 0:
            self.finish_reason = "length"
        if self.finish_reason and self._streams:
            text += self._stream.finish()
        if self._on_token is not None:
            self._on_token(token, text)
        return self.finish_reason is None

    def generation(self, seconds: float, **details: Any) -> Generation:
        """Return the finished answer; `details` are further fields of the result."""
        assert self.finish_reason is not None
        text = self._stream.text
        if not self._streams:
            text = self._tokenizer.decode([token.token_id for token in self.tokens], skip_special_tokens=True)
        provenance = [token.provenance for token in self.tokens]
        return Generation(
            prompt_ids=self.prompt_ids,
            tokens=self.tokens,
            text=text,
            finish_reason=self.finish_reason,
            num_tokens=len(self.tokens),
            num_rounds=len(self.round_lengths),
            num_drafted=self._num_drafted,
            num_pruned=self._num_pruned,
            num_accepted=len(provenance) - provenance.count(Provenance.TARGET),
            num_rescued=provenance.count(Provenance.RESCUED),
            seconds=seconds,
            round_lengths=self.round_lengths,
            decode=partial(text_pieces, self._tokenizer, self.params.stop),
            **details,
        )


def with_logprobs(
    tokens: Sequence[Token],  # n
    target_logits: Tensor,  # [n, V], raw logits that judged each token
    num_alternatives: int,
) -> list[Token]:
    """Return the tokens with their log-probabilities under the target and the most likely alternatives."""
    log_probs = target_logits.float().log_softmax(-1)
    top = log_probs.topk(min(num_alternatives, log_probs.shape[-1]), dim=-1)
    return [
        dataclasses.replace(
            token,
            logprob=float(row[token.token_id]),
            alternatives=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
        )
        for token, row, ids, values in zip(tokens, log_probs, top.indices, top.values, strict=True)
    ]
