"""State of one answer during decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reprieve.drafters.length import RoundLength
from reprieve.engine.stopwatch import Stopwatch
from reprieve.engine.text_stream import TextStream
from reprieve.models.sampling import Sampler
from reprieve.rules import RiskBudget, Rule
from reprieve.settings import SamplingParams
from reprieve.transfers import spread
from reprieve.types import Block, Context, RoundTrace, Token

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
