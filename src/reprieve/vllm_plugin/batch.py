"""A rule over a whole batch of requests at once: flat tensors in, decisions out. Knows nothing of vLLM.

Shapes: B requests, N drafted tokens of all of them one after another, V vocabulary, D hidden size. The rules and the
acceptance walk are those of the local engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reprieve.needs import Need
from reprieve.rules import Checked, LosslessRule, RiskBudget, Rule, accept, accepts
from reprieve.rules.checks import GreedyCheck, LosslessCheck, SampledCheck
from reprieve.transfers import spread
from reprieve.types import Block, Evidence, HiddenStates, Provenance, select_rows

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Row:
    """One request of the batch.

    Args:
        name: which of the operator's rules it asked for.
        rule: its own setting of that rule; lossless where it asked for none.
        num_drafted: its share of the flat tokens.
        greedy: how it samples.
        trusted: whether its drafted tokens come from the drafter, with all that the rule reads of the draft. Rows that
            are not are left to vLLM.
        budget: what is left of its answer's risk budget; reduced in place.
        context_ids: gives prompt and committed tokens [T], for rules that read the text.
    """

    name: str
    rule: Rule
    num_drafted: int
    greedy: bool
    trusted: bool
    budget: RiskBudget
    context_ids: Callable[[], Tensor]

    @property
    def strict(self) -> bool:
        """True if only vLLM's own check applies."""
        return not self.trusted or isinstance(self.rule, LosslessRule)


@dataclass(frozen=True)
class Batch:
    """Tensors that the engine has for the drafted tokens of one round."""

    token_ids: Tensor  # [N], int64; negative ones are padding
    scores: Tensor  # [N, V], the target's logits after penalties, masks, temperature, top-k and top-p
    logits: Tensor  # [N, V], the target's raw logits
    possible: Tensor  # [N], bool: not excluded by a grammar, a mask or a processor; top-k and top-p do not count
    proposal_probs: Tensor | None = None  # [N], probability the drafter proposed each token with; None: it is certain
    draft_scores: Tensor | None = None  # [N, V], the draft's, shaped as the target's
    uniforms: Tensor | None = None  # [N], the draws that speculative sampling will use
    noise: Tensor | None = None  # [N]
    node_logits: Tensor | None = None  # [N, V]
    node_hidden: HiddenStates | None = None  # [N, D] a layer
    parent_hidden: HiddenStates | None = None  # [N, D] a layer
    token_embeddings: Tensor | None = None  # [N, D], the target's
    top_embeddings: Tensor | None = None  # [N, D], of the target's most likely token
    answer_places: Tensor | None = None  # [N], int64: how many tokens of the answer precede the token
    num_draft_tokens: int | None = None  # the server's K

    @property
    def real(self) -> Tensor:
        """Tokens that may be accepted at all: [N], bool."""
        return self.possible & (self.token_ids >= 0)

    def evidence(self, index: slice, *, greedy: bool, context_ids: Tensor | None = None) -> Evidence:
        """Evidence for a rule about some tokens, as if all of their requests sampled, or none of them."""
        token_ids = self.token_ids[index].clamp_min(0)
        scores = self.scores[index]
        uniforms = None if greedy or self.uniforms is None else self.uniforms[index]
        proposal_probs = None if greedy else _rows(self.proposal_probs, index)
        check: LosslessCheck = GreedyCheck(scores, token_ids, EVERYTHING)
        if uniforms is not None:
            check = SampledCheck(scores, token_ids, EVERYTHING, uniforms=uniforms, proposal_probs=proposal_probs)
        return Evidence(
            token_ids=token_ids,
            target_logits=self.logits[index],
            greedy=greedy,
            lossless_accepts=check.accepts,
            target_scores=scores,
            draft_scores=_rows(self.draft_scores, index),
            proposal_probs=proposal_probs,
            uniforms=uniforms,
            noise=_rows(self.noise, index),
            node_logits=_rows(self.node_logits, index),
            node_hidden=select_rows(self.node_hidden, index),
            parent_hidden=select_rows(self.parent_hidden, index),
            token_embeddings=_rows(self.token_embeddings, index),
            top_embeddings=_rows(self.top_embeddings, index),
            parents=None if context_ids is None else range(-1, len(token_ids) - 1),
            context_ids=context_ids,
            answer_places=_rows(self.answer_places, index),
            num_draft_tokens=self.num_draft_tokens,
        )


@dataclass
class Decisions:
    """Decision on each drafted token; vLLM's own check decides if neither flag is set."""

    accept: Tensor  # [N], bool
    refuse: Tensor  # [N], bool
    lossless: Tensor  # [N], bool: what the lossless check alone would accept, of tokens that a rule was asked about
    relaxed: Tensor  # [N], bool: tokens verified against `scores`
    scores: Tensor | None = None  # [N, V]: to be verified against instead of the target's, where `relaxed`

    @classmethod
    def none(cls, batch: Batch) -> Decisions:
        """The engine's own check, everywhere."""
        return cls(*(torch.zeros_like(batch.token_ids, dtype=torch.bool) for _ in range(4)))


@dataclass(frozen=True)
class Asked:
    """Settings of one rule for each drafted token, from the token's request."""

    limits: Tensor  # [N], float64: each request's own threshold
    relaxed: Tensor  # [N], bool: whether the request asked for this rule
    greedy: Tensor  # [N], bool: how the request samples
    kinds: tuple[bool, ...]  # the values of `greedy` among those who asked, known to the host

    @classmethod
    def of(cls, name: str, rows: Sequence[Row], device: torch.device) -> Asked:
        """From the batch's requests."""
        mine = [row.name == name and not row.strict for row in rows]
        limits = [row.rule.threshold if own else -math.inf for row, own in zip(rows, mine, strict=True)]

        def flat(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
            each = [value for value, row in zip(values, rows, strict=True) for _ in range(row.num_drafted)]
            return spread(each, dtype, device)

        return cls(
            limits=flat(limits, torch.float64),
            relaxed=flat(mine, torch.bool),
            greedy=flat([row.greedy for row in rows], torch.bool),
            kinds=tuple({row.greedy for row, own in zip(rows, mine, strict=True) if own and row.num_drafted}),
        )


def decide(rows: Sequence[Row], batch: Batch) -> Decisions:
    """Apply each request's rule in its own setting.

    Rules that judge token by token are asked once for the whole batch, without waiting for the device. Those that
    look along a block, or count what they rescue, are asked request by request.
    """
    decisions = Decisions.none(batch)
    rules = {row.name: row.rule for row in rows if not row.strict}
    for name, rule in rules.items():
        if by_request(rule):
            decide_each(name, rows, batch, decisions)
        else:
            decide_together(rule, Asked.of(name, rows, batch.token_ids.device), batch, decisions)
    decisions.accept &= batch.real
    return decisions


def by_request(rule: Rule) -> bool:
    """Return whether the rule must run request by request, for which the host waits for the device."""
    return rule.traits.reads_block or rule.traits.limited or rule.traits.relaxes_target


def decide_together(rule: Rule, asked: Asked, batch: Batch, decisions: Decisions) -> None:
    """One rule, token by token, over the whole batch; its risk is the same at every setting of its dial."""
    for greedy in asked.kinds:
        evidence = batch.evidence(EVERYTHING, greedy=greedy)
        mine = asked.relaxed & (asked.greedy == greedy)
        passed = accepts(rule, evidence, threshold=asked.limits)
        decisions.lossless |= mine & evidence.lossless_accepts
        if rule.traits.replaces:
            decisions.accept |= mine & passed
            decisions.refuse |= mine & ~passed
        else:
            decisions.accept |= mine & passed & ~evidence.lossless_accepts


def decide_each(name: str, rows: Sequence[Row], batch: Batch, decisions: Decisions) -> None:
    """One rule, request by request, along each block."""
    for row, span in zip(rows, _spans(rows), strict=True):
        if row.strict or row.name != name:
            continue
        drafted = batch.token_ids[span].tolist()
        num_real = next((place for place, token_id in enumerate(drafted) if token_id < 0), len(drafted))
        real = slice(span.start, span.start + num_real)  # padding ends a block
        if not num_real:
            continue
        context = row.context_ids() if Need.CONTEXT in row.rule.traits.needs else None
        evidence = batch.evidence(real, greedy=row.greedy, context_ids=context)
        decisions.lossless[real] = evidence.lossless_accepts
        relaxed = row.rule.relaxed_target_probs(evidence)
        if relaxed is not None:
            if decisions.scores is None:
                decisions.scores = batch.scores.clone()
            decisions.scores[real] = relaxed.log()
            decisions.relaxed[real] = True
            continue
        outcome = accept(
            row.rule,
            Block.chain(evidence.token_ids),
            evidence,
            Checked.of_flags(evidence.lossless_accepts),  # the engine has drawn, and draws what follows
            budget=row.budget,
        )
        for node, provenance in zip(outcome.path, outcome.provenance, strict=True):
            decisions.accept[span.start + node] = provenance is Provenance.RESCUED


def _spans(rows: Sequence[Row]) -> list[slice]:
    spans, start = [], 0
    for row in rows:
        spans.append(slice(start, start + row.num_drafted))
        start += row.num_drafted
    return spans


def _rows(tensor: Tensor | None, index: slice) -> Tensor | None:
    return None if tensor is None else tensor[index]
