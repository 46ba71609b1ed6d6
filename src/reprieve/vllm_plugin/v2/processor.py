"""The operator's rules as a logits processor, the documented extension point of vLLM's V2 model runner.

vLLM calls it after penalties, bad words and grammar and before temperature, with a row of logits for each drafted token
and one for the bonus token. Where a rule accepts a drafted token its logit is raised above the row's best, so that
vLLM's own rejection sampler accepts it, greedy or sampling. Logits are vLLM's own copy: log-probabilities are read from
the originals. Everything stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from reprieve.needs import Need
from reprieve.rules import LosslessRule, RiskBudget, Rule
from reprieve.rules.batch import Batch, Decisions, TokenSettings, apply_rule
from reprieve.transfers import device_tensor
from reprieve.types import Context, gather_token
from reprieve.vllm_plugin.rounds import RequestRules, WorkerRules, request_settings
from reprieve.vllm_plugin.v2.round import V2Round

# How far an accepted token is lifted above the best: enough at temperatures up to 2 (vLLM's), finite at any above 0.
LIFT = 1e4
_WARM_UP = ("_warmup_", "_v2_mixed_warmup")  # ids of vLLM's own requests at start, whose rounds do not count


@dataclass
class Chunk:
    """The N rows of logits that vLLM verifies together, bonus rows included, and the decisions on them."""

    context: LogitsContext
    draft_token_ids: Tensor  # [N], the drafted token that each row judges; -1 for none
    decisions: Decisions
    request_ids: list[str]
    num_drafted: list[int]  # by request
    labels: list[str]  # of the counters, by request


class RuleProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Logits processor that lifts the drafted tokens which a request's rule accepts; keeps its state by request slot.

    Args:
        rules: the worker's.
        runner: the V2 model runner, which knows requests by slot.
    """

    def __init__(self, rules: WorkerRules, runner: Any) -> None:
        self.rules = rules
        self.runner = runner
        self.round: V2Round | None = None  # set while a batch with drafts is sampled
        self.chunk: Chunk | None = None  # what was decided last
        self._slots: dict[int, RequestRules] = {}
        self._tables: dict[tuple[str, float | None], TokenSettings] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Register a request in its slot; return whether a rule may change its logits."""
        request_id = self.runner.req_states.index_to_req_id.get(req_idx)
        if request_id is None:  # no request in this slot, as in the self-test
            request_id = f"slot {req_idx}"
            self.rules.forget([request_id])
        self._slots[req_idx] = known = self.rules.admit(request_id, lambda: request_settings(sampling_params))
        self._tables.clear()
        return not known.strict

    @property
    def _states(self) -> Any:
        """vLLM's own table of how each slot samples, on the host and on the device."""
        return self.runner.sampler.sampling_states

    def _greedy(self, slot: int) -> bool:
        return bool(self._states.temperature.np[slot] == 0.0)

    def forget_slots(self) -> None:
        """Drop the state of all slots."""
        self._slots.clear()
        self._tables.clear()

    def begin_chunk(self, raw_logits: Tensor, num_requests: int) -> None:
        """Start vLLM's next chunk of requests; `apply` follows only if one of them needs its logits processed."""
        self.chunk = None
        if self.round is not None:
            self.round.begin_chunk(raw_logits, num_requests)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Lift the drafted tokens that a rule accepts."""
        if self.round is None:
            return logits
        with self.rules.guarded("the rule failed; its requests are served losslessly"):
            self.chunk = self._decide(logits, ctx, self.round)
            if self.chunk is not None:
                _lift(logits, self.chunk.draft_token_ids, self.chunk.decisions.accept)
        return logits

    def _decide(self, logits: Tensor, ctx: LogitsContext, current: V2Round) -> Chunk | None:
        slots = [int(slot) for slot in ctx.idx_mapping_np]
        in_force = [self._in_force(slot) for slot in slots]
        if all(rule is None for rule in in_force):
            return None
        draft_token_ids = judged_ids(ctx)
        batch = self._batch(logits, ctx, draft_token_ids, slots, current)
        decisions = Decisions.none(batch)
        names: list[str] = []
        budgets: list[RiskBudget] = []
        for slot, rule in zip(slots, in_force, strict=True):
            if rule is None:
                names.append("")
                budgets.append(RiskBudget())
            else:
                names.append(self._slots[slot].choice.name)
                budgets.append(self._slots[slot].budget)
                budgets[-1].follow(rule)
        rules = {name: rule for name, rule in zip(names, in_force, strict=True) if rule is not None}
        for name, rule in rules.items():
            mine = [slot for slot, other in zip(slots, names, strict=True) if other == name]
            apply_rule(rule, self._token_settings(name, mine, ctx), budgets, batch, decisions)
        request_ids = current.request_ids[current.requests]
        labels = [
            "" if rule is None or request_id.startswith(_WARM_UP) else self.rules.counter.mark(request_id, name, rule)
            for request_id, name, rule in zip(request_ids, names, in_force, strict=True)
        ]
        num_drafted = [int(count) - 1 for count in current.num_rows[current.requests]]
        return Chunk(ctx, draft_token_ids, decisions, request_ids, num_drafted, labels)

    def _in_force(self, slot: int) -> Rule | None:
        """The rule of the request in a slot, in this round; None for the lossless check."""
        known = self._slots.get(slot)
        if known is None or known.strict:
            return None
        assert self.round is not None
        rule = self.rules.rule_of(known.choice, self.round.num_requests)
        return None if isinstance(rule, LosslessRule) else rule

    def _token_settings(self, name: str, slots: Sequence[int], ctx: LogitsContext) -> TokenSettings:
        """Return a rule's settings for each row, from a table by slot, rebuilt only when requests or load change."""
        assert self.round is not None
        policy = self.rules.menu.policies[name]
        at_load = policy.at_load(self.round.num_requests).dial_value if policy.by_load else None
        table = self._tables.get((name, at_load))
        if table is None:
            self._tables = {key: kept for key, kept in self._tables.items() if key[0] != name}
            table = self._tables[name, at_load] = self._table(name, ctx.expanded_idx_mapping.device)
        rows = ctx.expanded_idx_mapping.long()
        return TokenSettings(
            thresholds=table.thresholds[rows],
            selected=table.selected[rows],
            greedy=table.greedy[rows],
            greedy_modes=tuple({self._greedy(slot) for slot in slots}),
        )

    def _table(self, name: str, device: torch.device) -> TokenSettings:
        size = max(self._slots) + 1
        thresholds, selected, greedy = [-math.inf] * size, [False] * size, [True] * size
        for slot, known in self._slots.items():
            rule = self._in_force(slot)
            if rule is not None and known.choice.name == name:
                thresholds[slot], selected[slot] = rule.threshold, True
            greedy[slot] = self._greedy(slot)
        return TokenSettings(
            device_tensor(thresholds, torch.float64, device),
            device_tensor(selected, torch.bool, device),
            device_tensor(greedy, torch.bool, device),
            (),
        )

    def _batch(
        self, logits: Tensor, ctx: LogitsContext, draft_token_ids: Tensor, slots: Sequence[int], current: V2Round
    ) -> Batch:
        """Return the chunk's tensors that the rules need; vLLM's row r verifies the token fed at row r + 1."""
        needs = self.rules.menu.needs
        token_ids = draft_token_ids.clamp_min(0)
        sampling = not all(self._greedy(slot) for slot in slots)
        given: dict[str, Any] = {}
        scores = logits
        if sampling:
            scores = self._shaped(logits, ctx)
            given["uniforms"] = current.uniforms(ctx)
        if sampling or Need.DRAFT_PROBS in needs:
            given |= self._draft(ctx, current, token_ids, sampling=sampling)
        if Need.NODE_HIDDEN in needs:
            given["node_hidden"] = {-1: current.hidden(ahead=1)}
        if Need.PARENT_HIDDEN in needs:
            given["parent_hidden"] = {-1: current.hidden()}
        if Need.CONTEXT in needs:
            states, requests = self.runner.req_states, ctx.idx_mapping.long()
            token_ids_of_texts = states.all_token_ids.gpu[requests, : current.longest]
            given["context"] = Context(token_ids_of_texts, states.total_len.gpu[requests].long())
        if Need.ANSWER_POSITIONS in needs:
            prompts = self.runner.req_states.prompt_len.gpu[ctx.expanded_idx_mapping.long()]
            given["answer_positions"] = ctx.pos.long() + 1 - prompts
        if Need.EMBEDDINGS in needs:
            embed = self.runner.model.embed_input_ids
            given |= {"token_embeddings": embed(token_ids), "top_embeddings": embed(logits.argmax(-1))}
        raw = current.raw_logits if self.rules.menu.reads_raw_logits else None
        return Batch(
            token_ids=draft_token_ids,
            block_sizes=[int(count) for count in current.num_rows[current.requests]],  # a bonus row is padding
            scores=scores,
            logits=scores if raw is None else raw.float(),
            possible=gather_token(logits, token_ids) > -math.inf,
            noise=current.noise(ctx) if Need.NOISE in needs else None,
            num_draft_tokens=self.runner.num_speculative_steps,
            **given,
        )

    def _draft(self, ctx: LogitsContext, current: V2Round, token_ids: Tensor, *, sampling: bool) -> dict[str, Tensor]:
        """Return the drafter's distributions for the drafted tokens; empty if it keeps none."""
        draft = current.draft_scores(ctx)
        if draft is None:
            return {}
        scores = draft
        self._states.apply_temperature(scores, ctx.expanded_idx_mapping, ctx.idx_mapping_np)
        given = {}
        if sampling:  # vLLM draws and judges drafts without top-k and top-p
            given["proposal_probs"] = (gather_token(scores, token_ids) - scores.logsumexp(-1)).exp()
        if Need.DRAFT_PROBS in self.rules.menu.needs:
            scores = self._states.apply_top_k_top_p(scores, ctx.expanded_idx_mapping, ctx.idx_mapping_np)
        return {"draft_scores": scores, **given}

    def _shaped(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Return a copy with temperature, top-k and top-p applied as vLLM does; raw if greedy."""
        scores = logits.float().clone()
        self._states.apply_temperature(scores, ctx.expanded_idx_mapping, ctx.idx_mapping_np)
        shaped: Tensor = self._states.apply_top_k_top_p(scores, ctx.expanded_idx_mapping, ctx.idx_mapping_np)
        return shaped


def judged_ids(ctx: LogitsContext) -> Tensor:
    """Return the drafted token that each row verifies, [N], int64: the one fed at its request's next row, or -1."""
    token_ids = torch.full_like(ctx.input_ids, -1, dtype=torch.long)
    same_request = (ctx.expanded_idx_mapping[1:] == ctx.expanded_idx_mapping[:-1]) & (ctx.expanded_local_pos[1:] > 0)
    token_ids[:-1] = torch.where(same_request, ctx.input_ids[1:].long(), -1)
    return token_ids


def _lift(logits: Tensor, token_ids: Tensor, accept: Tensor) -> None:
    columns = token_ids.clamp_min(0).unsqueeze(-1)
    lifted = logits.amax(-1, keepdim=True) + LIFT
    logits.scatter_(-1, columns, torch.where(accept.unsqueeze(-1), lifted, logits.gather(-1, columns)))
