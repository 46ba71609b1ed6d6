"""The operator's rules as a logits processor of vLLM's V2 model runner: its documented door.

vLLM calls it after penalties, bad words and grammar and before temperature, with a row of logits for each drafted token
and one for the bonus token. Where a rule accepts a drafted token its logit is raised above the row's best, so that
vLLM's own rejection sampler accepts it, greedy or sampling. Logits are vLLM's own copy: log-probabilities are read from
the originals. Everything stays on the device, but for rules that are asked request by request.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from reprieve.needs import Need
from reprieve.rules import Rule
from reprieve.serving.vllm_plugin.batch import (
    Asked,
    Batch,
    Decisions,
    Row,
    by_request,
    decide_each,
    decide_together,
)
from reprieve.serving.vllm_plugin.rounds import RequestRules, WorkerRules
from reprieve.serving.vllm_plugin.v2_round import Round
from reprieve.transfers import spread
from reprieve.types import HiddenStates, gather_token

# How far an accepted token is raised above the best: enough at any temperature up to 100, and finite at any above 0.
LIFT = 1e4


@dataclass
class Sampling:
    """How the request in a slot samples."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass
class Chunk:
    """The N rows of logits that vLLM verifies at once, bonus rows included, and what was decided about them."""

    context: LogitsContext
    token_ids: Tensor  # [N], the drafted token that each row judges; -1 for none
    decisions: Decisions
    first_request: int  # of the round's requests
    labels: list[str]  # of the counters, by request


class RuleProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Rules by request slot.

    Args:
        rules: the worker's.
        runner: the V2 model runner, which knows requests by slot.
    """

    def __init__(self, rules: WorkerRules, runner: Any) -> None:
        self.rules = rules
        self.runner = runner
        self.round: Round | None = None  # set while a batch with drafts is sampled
        self.chunk: Chunk | None = None  # what was decided last
        self._slots: dict[int, RequestRules] = {}
        self._sampling: dict[int, Sampling] = {}
        self._tables: dict[tuple[str, int], Asked] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request enters a slot; whether a rule may touch it."""
        request_id = self.runner.req_states.index_to_req_id.get(req_idx, f"slot {req_idx}")
        known = self.rules.known(request_id, lambda: sampling_params.extra_args)
        self._slots[req_idx] = known
        greedy = sampling_params.temperature < 1e-5  # as vLLM itself draws the line
        self._sampling[req_idx] = Sampling(
            temperature=0.0 if greedy else sampling_params.temperature,
            top_k=max(sampling_params.top_k, 0),
            top_p=sampling_params.top_p,
            min_p=sampling_params.min_p,
        )
        self._tables.clear()
        return not known.strict

    def forget_slots(self) -> None:
        """As before the first request."""
        for kept in (self._slots, self._sampling, self._tables):
            kept.clear()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Raise the drafted tokens that a rule accepts."""
        self.chunk = None
        if self.round is None:
            return logits
        chunk = self.round.take(ctx)
        with self.rules.guarded("the rule failed; its requests are served losslessly"):
            self.chunk = self._decided(logits, ctx, chunk)
            if self.chunk is not None:
                _raise(logits, self.chunk.token_ids, self.chunk.decisions.accept)
        return logits

    def _decided(self, logits: Tensor, ctx: LogitsContext, chunk: tuple[int, slice]) -> Chunk | None:
        assert self.round is not None
        first_request, rows = chunk
        slots = [int(slot) for slot in ctx.idx_mapping_np]
        in_force = [self._in_force(slot) for slot in slots]
        if all(rule is None for rule in in_force):
            return None
        token_ids = judged_ids(ctx)
        batch = self._batch(logits, ctx, token_ids, slots, rows)
        decisions = Decisions.none(batch)
        names = [self._slots[slot].choice.name for slot in slots]
        rules = {name: rule for name, rule in zip(names, in_force, strict=True) if rule is not None}
        for name, rule in rules.items():
            if by_request(rule):
                decide_each(name, self._rows(slots, in_force, first_request), batch, decisions)
            else:
                decide_together(rule, self._asked(name, slots, ctx), batch, decisions)
        decisions.accept &= batch.real
        labels = [
            "" if rule is None else self.rules.label(name, rule) for name, rule in zip(names, in_force, strict=True)
        ]
        return Chunk(ctx, token_ids, decisions, first_request, labels)

    def _in_force(self, slot: int) -> Rule | None:
        """The rule of the request in a slot, in this round; None for the lossless check."""
        known = self._slots.get(slot)
        if known is None or known.strict:
            return None
        assert self.round is not None
        return self.rules.rule_of(known.choice, self.round.num_requests)

    def _asked(self, name: str, slots: Sequence[int], ctx: LogitsContext) -> Asked:
        """What each row's request asked of a rule, gathered from a table by slot that changes with requests only."""
        assert self.round is not None
        load = self.round.num_requests if self.rules.menu.policies[name].by_load else 0
        table = self._tables.get((name, load))
        if table is None:
            self._tables = {key: kept for key, kept in self._tables.items() if key[0] != name}
            table = self._tables[name, load] = self._table(name, ctx.expanded_idx_mapping.device)
        rows = ctx.expanded_idx_mapping.long()
        mine = [slot for slot in slots if self._slots[slot].choice.name == name and not self._slots[slot].strict]
        return Asked(
            limits=table.limits[rows],
            relaxed=table.relaxed[rows],
            greedy=table.greedy[rows],
            kinds=tuple({self._sampling[slot].greedy for slot in mine}),
        )

    def _table(self, name: str, device: torch.device) -> Asked:
        size = max(self._slots) + 1
        limits, relaxed, greedy = [-math.inf] * size, [False] * size, [True] * size
        for slot, known in self._slots.items():
            rule = self._in_force(slot)
            if rule is not None and known.choice.name == name:
                limits[slot], relaxed[slot] = rule.threshold, True
            greedy[slot] = self._sampling[slot].greedy
        return Asked(
            spread(limits, torch.float64, device),
            spread(relaxed, torch.bool, device),
            spread(greedy, torch.bool, device),
            (),
        )

    def _rows(self, slots: Sequence[int], in_force: Sequence[Rule | None], first_request: int) -> list[Row]:
        """The chunk's requests for rules that are asked one by one; a bonus row ends each block as padding does."""
        assert self.round is not None
        num_rows = self.round.num_rows[first_request : first_request + len(slots)]
        return [
            Row(
                known.choice.name,
                rule or known.choice.rule,
                int(num),
                self._sampling[slot].greedy,
                rule is not None,
                known.budget,
                functools.partial(self._text, slot),
            )
            for slot, rule, num, known in zip(
                slots, in_force, num_rows, (self._slots[slot] for slot in slots), strict=True
            )
        ]

    def _text(self, slot: int) -> Tensor:
        """Prompt and committed tokens, which lie on the device: nothing of the scheduler's is asked for."""
        states = self.runner.req_states
        length = int(states.total_len.gpu[slot])
        committed: Tensor = states.all_token_ids.gpu[slot, :length]
        return committed

    def _batch(self, logits: Tensor, ctx: LogitsContext, token_ids: Tensor, slots: Sequence[int], rows: slice) -> Batch:
        """The chunk's tensors, as far as the rules read them; vLLM's row r judges the token that row r + 1 was fed."""
        assert self.round is not None
        needs = self.rules.menu.needs
        real_ids = token_ids.clamp_min(0)
        sampling = [slot for slot in slots if not self._sampling[slot].greedy]
        given: dict[str, Any] = {}
        scores = logits
        if sampling:
            scores = self._shaped(logits, ctx)
            given["uniforms"] = self.round.uniforms(ctx)
        draft = self.round.draft_scores(ctx)
        if draft is not None and (sampling or Need.DRAFT_PROBS in needs):
            draft = self._shaped(draft, ctx) if Need.DRAFT_PROBS in needs else draft / self._per_row(ctx)[0]
            given["draft_scores"] = draft
            if sampling:
                given["proposal_probs"] = gather_token(draft.softmax(-1), real_ids)
        if Need.NODE_HIDDEN in needs:
            given["node_hidden"] = _hidden(self.round.hidden(rows, ahead=1))
        if Need.PARENT_HIDDEN in needs:
            given["parent_hidden"] = _hidden(self.round.hidden(rows))
        if Need.EMBEDDINGS in needs:
            embed = self.runner.model.embed_input_ids
            given |= {"token_embeddings": embed(real_ids), "top_embeddings": embed(logits.argmax(-1))}
        raw = self.round.raw_logits
        return Batch(
            token_ids=token_ids,
            scores=scores,
            logits=scores if raw is None else raw.float(),
            possible=gather_token(logits, real_ids) > -math.inf,
            noise=self.rules.noise(len(token_ids), token_ids.device),
            **given,
        )

    def _per_row(self, ctx: LogitsContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature [N, 1] (1 where greedy), top-k [N], top-p [N] and min-p [N, 1] of each row's request."""
        size = max(self._sampling) + 1
        kinds = [self._sampling.get(slot, Sampling()) for slot in range(size)]
        rows, device = ctx.expanded_idx_mapping.long(), ctx.expanded_idx_mapping.device
        temperature = spread([kind.temperature or 1.0 for kind in kinds], torch.float32, device)[rows]
        top_k = spread([kind.top_k or np.iinfo(np.int32).max for kind in kinds], torch.int32, device)[rows]
        top_p = spread([kind.top_p for kind in kinds], torch.float32, device)[rows]
        min_p = spread([kind.min_p for kind in kinds], torch.float32, device)[rows]
        return temperature.unsqueeze(-1), top_k, top_p, min_p.unsqueeze(-1)

    def _shaped(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """A copy under each request's temperature, min-p, top-k and top-p, as vLLM will draw from it; raw if greedy."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        temperature, top_k, top_p, min_p = self._per_row(ctx)
        scores = logits / temperature
        kinds = [self._sampling[int(slot)] for slot in ctx.idx_mapping_np]
        if any(kind.min_p for kind in kinds):
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + min_p.log(), -math.inf)
        limited_k = any(kind.top_k for kind in kinds)
        limited_p = any(kind.top_p < 1 for kind in kinds)
        if limited_k or limited_p:
            top_k = top_k.clamp_max(logits.shape[-1])
            scores = apply_top_k_top_p(scores, top_k if limited_k else None, top_p if limited_p else None)
        return scores


def judged_ids(ctx: LogitsContext) -> Tensor:
    """The drafted token that each row judges, [N], int64: the one fed at the next row of its request; -1 for none."""
    token_ids = torch.full_like(ctx.input_ids, -1, dtype=torch.long)
    goes_on = (ctx.expanded_idx_mapping[1:] == ctx.expanded_idx_mapping[:-1]) & (ctx.expanded_local_pos[1:] > 0)
    token_ids[:-1] = torch.where(goes_on, ctx.input_ids[1:].long(), -1)
    return token_ids


def _raise(logits: Tensor, token_ids: Tensor, accept: Tensor) -> None:
    columns = token_ids.clamp_min(0).unsqueeze(-1)
    lifted = logits.amax(-1, keepdim=True) + LIFT
    logits.scatter_(-1, columns, torch.where(accept.unsqueeze(-1), lifted, logits.gather(-1, columns)))


def _hidden(states: Tensor) -> HiddenStates:
    return {-1: states}
