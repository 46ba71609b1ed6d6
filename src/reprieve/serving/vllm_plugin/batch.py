"""A rule over a whole batch of requests at once: flat tensors in, decisions out. Knows nothing of vLLM.

Shapes: B requests, N drafted tokens of all of them one after another, V vocabulary, D hidden size. The rules and the
acceptance walk are those of the local engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.needs import Need
from reprieve.rules import Checked, LosslessRule, RiskBudget, Rule, accept, accepts
from reprieve.rules.checks import GreedyCheck, LosslessCheck, SampledCheck
from reprieve.transfers import spread
from reprieve.types import Block, Evidence, HiddenStates, Provenance, select_rows

Index = slice | Tensor  # flat tokens of some requests


@dataclass(frozen=True)
class Row:
    """One request of the batch.

    Args:
        rule: its own setting of the operator's rule; lossless where it asked for none.
        num_drafted: its share of the flat tokens.
        greedy: how it samples.
        trusted: whether its drafted tokens come from the drafter, with all that the rule reads of the draft. Rows that
            are not are left to vLLM.
        budget: what is left of its answer's risk budget; reduced in place.
        context_ids: gives prompt and committed tokens [T], for rules that read the text.
    """

    rule: Rule
    num_drafted: int
    greedy: bool
    trusted: bool
    budget: RiskBudget
    context_ids: Callable[[], Tensor]

    @property
    def strict(self) -> bool:
        """Whether vLLM's own check is to stand."""
        return not self.trusted or isinstance(self.rule, LosslessRule)


@dataclass(frozen=True)
class Batch:
    """What the engine knows about the drafted tokens of one round."""

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

    def evidence(self, index: Index, *, greedy: bool, context_ids: Tensor | None = None) -> Evidence:
        """What a rule may see of some requests that all sample, or all do not."""
        token_ids = self.token_ids[index].clamp_min(0)
        scores = self.scores[index]
        uniforms = None if greedy or self.uniforms is None else self.uniforms[index]
        proposal_probs = None if greedy else _rows(self.proposal_probs, index)
        check: LosslessCheck = GreedyCheck(scores, token_ids, slice(None))
        if uniforms is not None:
            check = SampledCheck(scores, token_ids, slice(None), uniforms=uniforms, proposal_probs=proposal_probs)
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
        )


@dataclass
class Decisions:
    """What the engine is to do with each drafted token; where neither flag is set, its own check stands."""

    accept: Tensor  # [N], bool
    refuse: Tensor  # [N], bool
    lossless: Tensor  # [N], bool: what the lossless check alone would accept
    scores: Tensor | None = None  # [N, V]: to be verified against instead of the target's; None for the target's


def decide(rule: Rule, rows: Sequence[Row], batch: Batch) -> Decisions:
    """Apply the operator's rule, in each request's own setting.

    Rules that judge token by token are asked once for the whole batch, without waiting for the device. Those that
    look along a block, or count what they rescue, are asked request by request.
    """
    flags = torch.zeros_like(batch.token_ids, dtype=torch.bool)
    decisions = Decisions(accept=flags.clone(), refuse=flags.clone(), lossless=flags)
    if _by_request(rule):
        _decide_each(rows, batch, decisions)
    else:
        for index, chosen in _alike(rows, batch.token_ids.device):
            _decide_together(rule, chosen, index, batch, decisions)
    real = batch.possible & (batch.token_ids >= 0)
    decisions.accept &= real
    return decisions


def _by_request(rule: Rule) -> bool:
    return rule.traits.reads_block or rule.traits.limited or rule.traits.relaxes_target


def _alike(rows: Sequence[Row], device: torch.device) -> list[tuple[Index, list[Row]]]:
    """The requests that sample and those that do not, each with its tokens; all tokens where there is one kind."""
    kinds = {row.greedy for row in rows if row.num_drafted}
    if len(kinds) < 2:
        return [(slice(None), list(rows))] if kinds else []
    spans = _spans(rows)
    groups: list[tuple[Index, list[Row]]] = []
    for kind in (True, False):
        of_kind = [place for place, row in enumerate(rows) if row.greedy is kind and row.num_drafted]
        flat = [token for place in of_kind for token in range(spans[place].start, spans[place].stop)]
        groups.append((spread(flat, torch.long, device), [rows[place] for place in of_kind]))
    return groups


def _decide_together(rule: Rule, rows: list[Row], index: Index, batch: Batch, decisions: Decisions) -> None:
    greedy = next(row.greedy for row in rows if row.num_drafted)
    evidence = batch.evidence(index, greedy=greedy)
    decisions.lossless[index] = evidence.lossless_accepts
    if all(row.strict for row in rows):
        return
    limits = [-math.inf if row.strict else row.rule.threshold for row in rows for _ in range(row.num_drafted)]
    passed = accepts(rule, evidence, threshold=spread(limits, torch.float64, batch.token_ids.device))
    if rule.traits.replaces:
        strict = [row.strict for row in rows for _ in range(row.num_drafted)]
        relaxed = ~spread(strict, torch.bool, batch.token_ids.device)
        decisions.accept[index] = passed & relaxed
        decisions.refuse[index] = ~passed & relaxed
    else:
        decisions.accept[index] = passed & ~evidence.lossless_accepts


def _decide_each(rows: Sequence[Row], batch: Batch, decisions: Decisions) -> None:
    for row, span in zip(rows, _spans(rows), strict=True):
        drafted = batch.token_ids[span].tolist()
        num_real = next((place for place, token_id in enumerate(drafted) if token_id < 0), len(drafted))
        real = slice(span.start, span.start + num_real)  # padding ends a block
        if not num_real:
            continue
        context = row.context_ids() if Need.CONTEXT in row.rule.traits.needs else None
        evidence = batch.evidence(real, greedy=row.greedy, context_ids=context)
        decisions.lossless[real] = evidence.lossless_accepts
        if row.strict:
            continue
        relaxed = row.rule.relaxed_target_probs(evidence)
        if relaxed is not None:
            if decisions.scores is None:
                decisions.scores = batch.scores.clone()
            decisions.scores[real] = relaxed.log()
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


def _rows(tensor: Tensor | None, index: Index) -> Tensor | None:
    return None if tensor is None else tensor[index]
