"""Apply rules to a whole batch of requests: flat tensors in, decisions out.

Shapes: B requests, N drafted tokens of all requests, concatenated, K drafted tokens in the longest block, V vocabulary
size, D hidden size. The rules and the lossless check are those of the local engine. No function here waits for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reprieve.rules import LosslessRule, RiskBudget, Rule
from reprieve.rules.base import RescueLimits, bounded_risk, within_threshold
from reprieve.rules.lossless import MatchCheck, SampledCheck
from reprieve.transfers import device_tensor
from reprieve.types import ROOT, Evidence, RuleInputs

EVERYTHING = slice(None)
_INPUTS = tuple(field.name for field in fields(RuleInputs))


@dataclass(frozen=True)
class BatchRequest:
    """One request of the batch.

    Args:
        name: name of the operator's rule that applies.
        rule: that rule at the request's own setting, or the lossless rule.
        num_drafted: number of the request's drafted tokens among the N.
        greedy: True if the request decodes greedily.
        trusted: True if the drafted tokens come from the drafter, with all draft inputs that the rule reads. Other
            requests are left to vLLM.
        budget: reduced in place by the risk of rescued tokens.
    """

    name: str
    rule: Rule
    num_drafted: int
    greedy: bool
    trusted: bool
    budget: RiskBudget

    @property
    def strict(self) -> bool:
        """True if only vLLM's own check applies."""
        return not self.trusted or isinstance(self.rule, LosslessRule)


@dataclass(frozen=True)
class Batch(RuleInputs):
    """Tensors that the engine has for the drafted tokens of one round, [N, ...] each; the context has B texts."""

    token_ids: Tensor  # [N], int64; negative ones are padding, which ends a block
    block_sizes: Sequence[int]  # [B], drafted tokens by request, padding included; their sum is N
    scores: Tensor  # [N, V], the target's logits after penalties, masks, temperature, top-k and top-p
    logits: Tensor  # [N, V], the target's raw logits
    possible: Tensor  # [N], bool: not excluded by a grammar, a mask or a processor; top-k and top-p do not count

    @property
    def real(self) -> Tensor:
        """Tokens that may be accepted at all: [N], bool."""
        return self.possible & (self.token_ids >= 0)

    def lossless_accepts(self, scores: Tensor, *, greedy: bool) -> Tensor:
        """Return which tokens pass the lossless check against these scores [N, V] of the target, [N], bool."""
        token_ids = self.token_ids.clamp_min(0)
        if greedy or self.uniforms is None:
            return MatchCheck(scores, token_ids, EVERYTHING).accepts
        uniforms, proposal_probs = self.uniforms, self.proposal_probs
        return SampledCheck(scores, token_ids, EVERYTHING, uniforms=uniforms, proposal_probs=proposal_probs).accepts

    def evidence(self, *, greedy: bool) -> Evidence:
        """Return evidence for a rule, treating all requests as greedy or all as sampled."""
        inputs = {name: getattr(self, name) for name in _INPUTS}
        if greedy:
            inputs |= {"uniforms": None, "proposal_probs": None}
        layout = _layout(tuple(self.block_sizes))
        return Evidence(
            token_ids=self.token_ids.clamp_min(0),
            target_logits=self.logits,
            greedy=greedy,
            lossless_accepts=self.lossless_accepts(self.scores, greedy=greedy),
            target_scores=self.scores,
            parents=layout.parents,
            padding=self.token_ids < 0,
            context_rows=layout.rows,
            **inputs,
        )


@dataclass
class Decisions:
    """Decision on each drafted token; vLLM's own check decides if neither flag is set."""

    accept: Tensor  # [N], bool
    refuse: Tensor  # [N], bool
    lossless: Tensor  # [N], bool: tokens under a rule that the lossless check alone would accept
    relaxed: Tensor  # [N], bool: tokens verified against `scores`
    scores: Tensor | None = None  # [N, V]: replace the target's scores in verification where `relaxed`


def decide(requests: Sequence[BatchRequest], batch: Batch) -> Decisions:
    """Apply each request's rule at its own setting.

    A rule runs once for greedy and once for sampled requests: risks do not depend on the dial.
    """
    device, real = batch.token_ids.device, batch.real
    decisions = Decisions(*(torch.zeros_like(real) for _ in range(4)))
    sizes = device_tensor(list(batch.block_sizes), torch.long, device)
    budgets = [request.budget for request in requests]

    def by_token(values: list[Any], dtype: torch.dtype) -> Tensor:  # [B] to [N]
        return device_tensor(values, dtype, device).repeat_interleave(sizes, output_size=len(real))

    modes = dict.fromkeys((one.name, one.greedy) for one in requests if not one.strict and one.num_drafted)
    for name, greedy in modes:
        mine = [not one.strict and (one.name, one.greedy) == (name, greedy) for one in requests]
        rule = requests[mine.index(True)].rule
        limits = [one.rule.threshold if own else -math.inf for one, own in zip(requests, mine, strict=True)]
        thresholds, selected = by_token(limits, torch.float64), by_token(mine, torch.bool)
        evidence = batch.evidence(greedy=greedy)
        lossless = evidence.lossless_accepts
        decisions.lossless |= selected & lossless
        probs = rule.relaxed_target_probs(evidence, threshold=thresholds)
        if probs is not None:
            relaxed = selected & real
            before = batch.scores if decisions.scores is None else decisions.scores
            decisions.scores = torch.where(relaxed.unsqueeze(-1), probs.log().to(before.dtype), before)
            decisions.relaxed |= relaxed
            continue
        risk = bounded_risk(rule, evidence)
        passed = within_threshold(risk, thresholds)
        if rule.traits.replaces:
            decisions.accept |= selected & passed & real
            decisions.refuse |= selected & ~passed
            continue
        rescued = selected & passed & ~lossless & real
        if rule.limits is not None:
            rescued = _within_limits(rule.limits, rescued, lossless & real, risk, budgets, batch)
        decisions.accept |= rescued
    return decisions


def _within_limits(
    limits: RescueLimits, rescued: Tensor, lossless: Tensor, risk: Tensor, budgets: Sequence[RiskBudget], batch: Batch
) -> Tensor:
    """Return the rescues that the limits per block and per answer allow, [N], and charge their risk to the budgets.

    A block is accepted up to its first refusal, so cumulative sums over a block are sums along its accepted path.
    """
    device, sizes = risk.device, batch.block_sizes
    rows, columns = cells_of(sizes, device)

    def by_block(flat: Tensor) -> Tensor:  # [N] to [B, K]
        return flat.new_zeros(len(sizes), max(sizes)).index_put((rows, columns), flat)

    # Negative and infinite risks (typical, any_of) cost nothing: budgets belong to rules with risk >= 0.
    cost = by_block(torch.where(rescued, risk.double().clamp_min(0.0), 0.0))
    left = torch.stack([budget.on(device) for budget in budgets])
    allowed = cost.cumsum(-1) <= left.unsqueeze(-1)
    if limits.per_block is not None:
        allowed &= by_block(rescued).cumsum(-1) <= limits.per_block
    allowed &= by_block(rescued)
    path = (allowed | by_block(lossless)).cumprod(-1)
    spent = (cost * allowed * path).sum(-1)
    for budget, cost_of_answer in zip(budgets, spent.unbind(), strict=True):
        budget.spent = budget.spent + cost_of_answer
    return allowed[rows, columns]


def cells_of(block_sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the request of each of the N drafted tokens and its position in the block, [N] each."""
    layout = _layout(tuple(block_sizes))
    return device_tensor(list(layout.rows), torch.long, device), device_tensor(list(layout.columns), torch.long, device)


class _Layout(NamedTuple):
    """Request, position and parent of each of the N drafted tokens."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]  # the position in the block
    parents: tuple[int, ...]  # the token before it in the block, or ROOT


@lru_cache(maxsize=64)
def _layout(block_sizes: tuple[int, ...]) -> _Layout:
    """Return the layout of a batch; batches of a server have few different ones."""
    rows = tuple(row for row, size in enumerate(block_sizes) for _ in range(size))
    columns = tuple(column for size in block_sizes for column in range(size))
    return _Layout(rows, columns, tuple(token - 1 if column else ROOT for token, column in enumerate(columns)))
