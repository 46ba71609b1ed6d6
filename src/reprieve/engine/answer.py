"""State of one answer during decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from reprieve.engine.text import TextStream, special_tokens, text_pieces
from reprieve.settings import SamplingParams
from reprieve.types import Generation, Provenance, Token, Tokenizer

OnToken = Callable[[Token, str], None]  # a committed token and the text that became final with it


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
