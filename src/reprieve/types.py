"""The frozen records that models, drafters, rules and the engine exchange.

Shapes: N drafted tokens in the block, V vocabulary, D hidden size. A chain is a tree in which every node has one
child, so there is one set of records and one verification path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from reprieve.display import html_of, print_pieces
from reprieve.errors import ReprieveError
from reprieve.transfers import to_device

ROOT = -1  # the parent of nodes that follow the last committed token
PARTS = ("prefill", "draft", "verify", "advise", "rule", "commit")  # of an answer's time

# Hidden states by layer, [n, D] each: indices into transformers' `hidden_states`; -1 is the last, after the norm.
HiddenStates = Mapping[int, Tensor]


class Tokenizer(Protocol):
    """The part of a tokenizer that rules and the engine need."""

    eos_token_id: int | None

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


Progress = Callable[[int, int], None]  # called with the number of finished units of work, and of all


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


def select_rows(hidden: HiddenStates | None, rows: Tensor | slice) -> HiddenStates | None:
    """The same rows of every layer's hidden states; None stays None."""
    return None if hidden is None else {layer: states[rows] for layer, states in hidden.items()}


class Provenance(StrEnum):
    """Origin of a committed token."""

    TARGET = "target"  # fallback or bonus token
    MATCHED = "matched"  # drafted, and the lossless check accepts it
    RESCUED = "rescued"  # drafted, accepted although the lossless check rejects it


@dataclass(frozen=True)
class Block:
    """The drafted tokens of one round, parents before children.

    `deterministic` means that the drafter did not sample (greedy drafting, n-grams, a scripted tree): the proposal
    probability of each token is then 1, regardless of `draft_logits`. `num_pruned` counts nodes that were drafted and
    pruned before verification.
    """

    token_ids: Tensor  # [N], int64, on the target's device
    parents: Sequence[int]  # [N], ROOT or an earlier node
    draft_logits: Tensor | None = None  # [N, V], the draft's raw logits that proposed node i
    draft_hidden: HiddenStates | None = None  # [N, Dd] a layer: the draft's hidden states that encode node i
    deterministic: bool = False
    num_pruned: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> list[int]:
        """Distance of each node from the last committed token, 1 or more."""
        return node_depths(self.parents)

    @cached_property
    def parent_rows(self) -> Tensor | slice:
        """Rows of a `Verification` that judge each node: those of its parent; a slice, so a view, for chains. [N]"""
        if self.is_chain:
            return slice(0, self.num_tokens)
        return to_device(torch.tensor(self.parents), self.token_ids.device) + 1

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Children of each node, and of ROOT, in drafting order."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Block:
        """A block with nothing drafted: the round is then one plain target step."""
        return cls(token_ids=torch.empty(0, dtype=torch.long, device=device), parents=())

    @classmethod
    def chain(
        cls,
        token_ids: Tensor,  # [N], int64
        *,
        draft_logits: Tensor | None = None,  # [N, V]
        draft_hidden: HiddenStates | None = None,  # [N, Dd] a layer
        deterministic: bool = False,
    ) -> Block:
        """A block whose tokens follow one another."""
        parents = tuple(range(-1, len(token_ids) - 1))
        return cls(token_ids, parents, draft_logits, draft_hidden, deterministic)


@dataclass(frozen=True)
class Prefill:
    """Target outputs for a prompt of which it has read n tokens."""

    logits: Tensor | None = None  # [V], the distribution after the last of them; None where it read nothing
    hidden: HiddenStates | None = None  # [n, Dt] a layer; None where no layer was asked for, or nothing read


@dataclass(frozen=True)
class Verification:
    """Target outputs of one forward over the last committed token and the block.

    Row 0 belongs to the last committed token, row i + 1 to node i.
    """

    logits: Tensor  # [N + 1, V], the target's distribution after each row
    hidden: HiddenStates | None = None  # [N + 1, Dt] a layer: the target's hidden states that encode each row


@dataclass(frozen=True)
class Context:
    """Token ids before the drafted tokens (prompt and committed tokens), of one request or of a batch."""

    token_ids: Tensor  # [B, T], oldest first; ids past a text's length are ignored
    lengths: Tensor  # [B], int64


class Need(StrEnum):
    """Fields of `Evidence` that are expensive; the engine fills in only those that a rule declares."""

    DRAFT_PROBS = "draft_probs"
    DRAFT_HIDDEN = "draft_hidden"
    NODE_HIDDEN = "node_hidden"
    PARENT_HIDDEN = "parent_hidden"
    EMBEDDINGS = "embeddings"  # `token_embeddings` and `top_embeddings`
    NOISE = "noise"
    ADVICE = "advice"
    CONTEXT = "context"
    ANSWER_POSITIONS = "answer_positions"


@dataclass(frozen=True, kw_only=True)
class RuleInputs:
    """Optional inputs of a rule; None where it does not read them. Shapes as in `Evidence`."""

    draft_scores: Tensor | None = None  # [..., V]; None when the drafter has no distribution
    draft_logits: Tensor | None = None  # [..., V], raw; None as above
    proposal_probs: Tensor | None = None  # [...], of each token; None where the drafter did not sample
    uniforms: Tensor | None = None  # [...], in [0, 1); the lossless check's draws; None when greedy
    noise: Tensor | None = None  # [...], in [0, 1); independent draws for rules that are random themselves
    node_hidden: HiddenStates | None = None  # [..., Dt] a layer, the target's, encoding the token
    parent_hidden: HiddenStates | None = None  # [..., Dt] a layer, the target's, that predicted the token
    draft_hidden: HiddenStates | None = None  # [..., Dd] a layer, the draft's, encoding the token
    token_embeddings: Tensor | None = None  # [..., D], the target's input embedding of the token
    top_embeddings: Tensor | None = None  # [..., D], that of the target's most likely token in its place
    context: Context | None = None
    answer_positions: Tensor | None = None  # [...], int64: how many tokens of the answer precede the token
    num_draft_tokens: int | None = None  # the engine's K; a block can be shorter. None if K varies


@dataclass(frozen=True)
class Evidence(RuleInputs):
    """Inputs of a rule, for drafted tokens in any leading shape `...` ([N] here, [num_tokens] in vLLM).

    Scores are logits after temperature, top-k and top-p, so that their softmax is what tokens are sampled from; when
    decoding greedily they are the raw logits, so that divergences stay defined. Probabilities are computed on first
    access.
    """

    token_ids: Tensor  # [...], int64
    target_logits: Tensor  # [..., V], raw: they judge the drafted token
    greedy: bool
    lossless_accepts: Tensor  # [...], bool: whether the lossless check alone would accept the token
    target_scores: Tensor | None = None  # [..., V]; None for the raw logits
    target_ids: Tensor | None = None  # [...], the target's own draw at each position (check `exact`)
    advice: Tensor | None = None  # [...], what an advisor's extra forward returned
    parents: Sequence[int] | None = None  # [N], ROOT or an earlier node; None for a chain
    padding: Tensor | None = None  # [...], bool: True for padding; None without padding
    context_rows: Sequence[int] | None = None  # [N], each token's text in `context`; None for the only one

    @cached_property
    def own_ids(self) -> Tensor:
        """Target's own token at each position: its draw if it drew one, else its first choice. [...]"""
        return self.target_logits.argmax(-1) if self.target_ids is None else self.target_ids

    @property
    def scores(self) -> Tensor:
        """Scores for comparisons: the target's processed scores when sampling, its raw logits when greedy. [..., V]"""
        return self.target_logits if self.target_scores is None else self.target_scores

    @cached_property
    def allowed(self) -> Tensor:
        """Mask of tokens that the target can produce; top-k, top-p or a grammar may exclude others. [...], bool"""
        return gather_token(self.scores, self.token_ids) > -math.inf

    @cached_property
    def possible(self) -> Tensor:
        """Mask of tokens with nonzero probability under the raw logits; a grammar may exclude others. [...], bool"""
        return gather_token(self.target_logits, self.token_ids) > -math.inf

    @cached_property
    def target_probs(self) -> Tensor:
        """[..., V]"""
        return self.scores.softmax(-1)

    @cached_property
    def draft_probs(self) -> Tensor | None:
        """[..., V], or None when the drafter has no distribution."""
        return None if self.draft_scores is None else self.draft_scores.softmax(-1)

    @cached_property
    def target_log_probs(self) -> Tensor:
        """log of `target_probs`, [..., V]; -inf where a token is excluded."""
        return self.scores.log_softmax(-1)

    @cached_property
    def token_log_probs(self) -> Tensor:
        """The target's log-probability of each drafted token, [...]."""
        return gather_token(self.target_log_probs, self.token_ids)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Return the distance of each node from the last committed token, 1 or more; `parents` as in `Block`. [N]"""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def gather_token(values: Tensor, token_ids: Tensor) -> Tensor:
    """`values[..., token_ids]`: [..., V] and [...] to [...]."""
    return values.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Outcome:
    """Result of a round: a path through the block, then one token of the target."""

    path: list[int]  # accepted nodes, first to last
    token_ids: list[int]  # of the path
    provenance: list[Provenance]  # of the path
    next_token_id: int  # fallback token, or bonus token after a fully accepted branch
    risks: list[float] | None = None  # of the path, where the rule has a risk

    @property
    def num_rescued(self) -> int:
        return self.provenance.count(Provenance.RESCUED)

    @property
    def committed_ids(self) -> list[int]:
        """All tokens the round adds to the text."""
        return [*self.token_ids, self.next_token_id]


@dataclass(frozen=True)
class Token:
    """One committed token, as streams and traces show it."""

    token_id: int
    provenance: Provenance
    risk: float | None = None
    logprob: float | None = None  # under the target's raw distribution, nats; None unless asked for
    alternatives: tuple[tuple[int, float], ...] = ()  # the target's most likely tokens there and their logprobs


@dataclass(frozen=True)
class RoundTrace:
    """One round in full: kept only when a trace was asked for."""

    drafted_ids: list[int]
    parents: list[int]
    target_ids: list[int]  # the target's own token at each node: its draw where the rule compares with draws, else top
    target_log_probs: list[float]  # of each drafted token under the target's raw distribution, nats
    risks: list[float] | None
    advice: list[float] | None
    bonus_id: int | None  # the target's token after the whole chain; None if it would be sampled
    lossless_accepts: list[bool]
    path: list[int]
    committed: list[Token]


@dataclass(frozen=True, kw_only=True)
class DecodingStats:
    """Cost of decoding an answer. Counts are of tokens, seconds wall clock."""

    num_tokens: int
    num_rounds: int
    num_drafted: int  # verified
    num_pruned: int = 0  # drafted, and cut away before verification
    num_accepted: int  # drafted tokens in the answer, rescued ones included
    num_rescued: int
    seconds: float
    seconds_by_part: dict[str, float] = field(default_factory=dict)  # of each of PARTS; {} unless they were timed
    round_lengths: list[int] = field(default_factory=list)  # committed tokens of each round

    @property
    def tokens_per_round(self) -> float:
        """tau: committed tokens per round, fallback and bonus included; at most K + 1."""
        return self.num_tokens / max(1, self.num_rounds)

    @classmethod
    def total(cls, answers: Sequence[DecodingStats]) -> DecodingStats:
        """Return the sum of all counts and seconds; the lengths of all rounds, in order."""
        numbers = [number.name for number in fields(DecodingStats) if number.type in ("int", "float")]
        return DecodingStats(
            **{name: sum(getattr(answer, name) for answer in answers) for name in numbers},
            seconds_by_part={part: sum(answer.seconds_by_part.get(part, 0.0) for answer in answers) for part in PARTS},
            round_lengths=[length for answer in answers for length in answer.round_lengths],
        )

    @property
    def stats(self) -> dict[str, Any]:
        """These numbers alone, without the fields of a subclass: as another record takes them."""
        return {one.name: getattr(self, one.name) for one in fields(DecodingStats)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation(DecodingStats):
    """A finished answer and how it was made."""

    prompt_ids: list[int]
    tokens: list[Token]
    text: str
    finish_reason: str  # "eos", "stop" or "length"
    trace: list[RoundTrace] | None = None
    # Maps token ids to the text that each of them completed.
    decode: Callable[[list[int]], list[str]] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Generation({self.text!r:.80}, {self.summary})"

    @property
    def summary(self) -> str:
        """Its counts in one line."""
        return f"{self.num_tokens} tokens in {self.num_rounds} rounds, {self.num_rescued} rescued, {self.finish_reason}"

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """Text and provenance of each token; their texts together are `text`.

        Raises:
            ReprieveError: a generation without a tokenizer.
        """
        if self.decode is None:
            raise ReprieveError("this generation has no tokenizer to show its tokens with; print its text")
        texts = self.decode(self.token_ids)
        return [(text, token.provenance.value) for text, token in zip(texts, self.tokens, strict=True)]

    def show(self) -> None:
        """Print the text with each token marked by where it comes from."""
        print_pieces(self.pieces, self.summary)

    def _repr_html_(self) -> str | None:
        return None if self.decode is None else html_of(self.pieces, self.summary)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]
