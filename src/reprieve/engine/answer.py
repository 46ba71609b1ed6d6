"""State of one answer during decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from reprieve.drafters.length import DraftLength, RoundLength
from reprieve.engine.prompt import Tokenizer
from reprieve.engine.stopwatch import Stopwatch
from reprieve.engine.text_stream import TextStream, special_tokens, text_pieces
from reprieve.models.sampling import Sampler
from reprieve.rules import RiskBudget, Rule
from reprieve.settings import SamplingParams
from reprieve.transfers import spread
from reprieve.types import Block, Context, Generation, RoundTrace, Token

OnToken = Callable[[Token, str], None]  # a committed token and the text that became final with it


@dataclass
class Answer:
    """State of one answer during decoding: committed tokens, remaining budget, finish reason."""

    prompt_ids: list[int]
    unread: list[int]  # prompt or committed tokens that the target has not read
    params: SamplingParams
    sampler: Sampler
    stream: TextStream
    rule: Rule
    budget: RiskBudget
    length: RoundLength
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]  # special tokens that are stop texts
    watch: Stopwatch
    on_token: OnToken | None
    tokens: list[Token] = field(default_factory=list)
    trace: list[RoundTrace] | None = None
    round_lengths: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_pruned: int = 0
    finish_reason: str | None = None

    @property
    def num_left(self) -> int:
        return self.params.max_new_tokens - len(self.tokens)

    @property
    def streams(self) -> bool:
        """True where text is needed token by token."""
        return self.on_token is not None or bool(self.params.stop)

    def positions(self, block: Block) -> Tensor:
        """Return the positions of a block's tokens in the answer, from 0: [N], int64."""
        first = len(self.tokens) - 1
        return spread([first + depth for depth in block.depths], torch.long, block.token_ids.device)

    def context(self, device: torch.device) -> Context:
        """Return the prompt and committed tokens as one text."""
        token_ids = spread([*self.prompt_ids, *(token.token_id for token in self.tokens)], torch.long, device)
        return Context(token_ids.unsqueeze(0), spread([len(token_ids)], torch.long, device))

    @classmethod
    def begin(
        cls,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        rule: Rule,
        sampler: Sampler,
        length: DraftLength,
        eos_ids: Collection[int],
        *,
        params: SamplingParams | None = None,
        watch: Stopwatch,
        on_token: OnToken | None = None,
        trace: bool = False,
    ) -> Answer:
        """Return an answer without tokens.

        Args:
            eos_ids: tokens that end a text, unless the parameters say otherwise.
            params: of this answer; None for the sampler's.
        """
        params = params or sampler.params
        special = special_tokens(tokenizer) if params.stop else {}
        ends = eos_ids if params.eos_token_ids is None else params.eos_token_ids
        return cls(
            prompt_ids=prompt_ids,
            unread=prompt_ids,
            params=params,
            sampler=sampler,
            stream=TextStream(tokenizer, params.stop),
            rule=rule,
            budget=RiskBudget.of(rule),
            length=length.start(rule.dial_value, params.temperature),
            eos_ids=frozenset() if params.ignore_eos else frozenset(ends),
            stop_ids=frozenset(special[text] for text in params.stop if text in special),
            watch=watch,
            on_token=on_token,
            trace=[] if trace else None,
        )

    def take_round(self, tokens: Sequence[Token], num_drafted: int, num_pruned: int = 0) -> bool:
        """Commit a round's tokens, up to the one that ends the answer; return False once it has ended."""
        self.num_drafted += num_drafted
        self.num_pruned += num_pruned
        first = len(self.tokens)
        for token in tokens:
            if not self.take(token):
                break
        self.round_lengths.append(len(self.tokens) - first)
        return self.finish_reason is None

    def generation(self, tokenizer: Tokenizer, seconds: float) -> Generation:
        """Return the finished answer."""
        assert self.finish_reason is not None
        text = self.stream.text
        if not self.streams:
            text = tokenizer.decode([token.token_id for token in self.tokens], skip_special_tokens=True)
        return Generation(
            prompt_ids=self.prompt_ids,
            tokens=self.tokens,
            text=text,
            finish_reason=self.finish_reason,
            num_rounds=len(self.round_lengths),
            num_drafted=self.num_drafted,
            num_pruned=self.num_pruned,
            seconds=seconds,
            seconds_by_part=self.watch.seconds,
            round_lengths=self.round_lengths,
            trace=self.trace,
            decode=partial(text_pieces, tokenizer, self.params.stop),
        )

    def take(self, token: Token) -> bool:
        """Commit one token; return False once the answer has ended."""
        self.tokens.append(token)
        ended = token.token_id in self.eos_ids
        text = self.stream.push(token.token_id) if self.streams else ""
        if token.token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif ended:
            self.finish_reason = "eos"
        elif self.stream.stopped:
            self.finish_reason = "stop"
        elif self.num_left == 0:
            self.finish_reason = "length"
        if self.finish_reason and self.streams:
            text += self.stream.finish()
        if self.on_token is not None:
            self.on_token(token, text)
        return self.finish_reason is None


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
