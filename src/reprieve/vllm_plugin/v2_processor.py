"""The operator's rules as a logits processor, the documented extension point of vLLM's V2 model runner.

vLLM calls it after penalties, bad words and grammar and before temperature, with a row of logits for each drafted token
and one for the bonus token. Where a rule accepts a drafted token its logit is raised above the row's best, so that
vLLM's own rejection sampler accepts it, greedy or sampling. Logits are vLLM's own copy: log-probabilities are read from
the originals. Everything stays on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import tl_rand32
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

from reprieve.policies.menu import Choice
from reprieve.policies.policy import STRICT
from reprieve.rules import RiskBudget
from reprieve.rules.batch import Batch, BatchRequest, Decisions
from reprieve.types import Context, Need, gather_token
from reprieve.vllm_plugin.rounds import RequestRules, WorkerRules, request_settings

NOISE_KEY = 0x5DEECE66D  # sets a request's noise apart from the draws of vLLM's own samplers
# How far an accepted token is lifted above the best: enough at temperatures up to 2 (vLLM's), finite at any above 0.
LIFT = 1e4


@dataclass
class V2Round:
    """One batch that is being verified; vLLM may cut it into chunks of whole requests."""

    request_ids: list[str]
    num_rows: np.ndarray  # [B], logits rows of each request
    states: Tensor | None  # [rows, D], the target's hidden states
    draft_logits: Tensor | None  # [slots, K, V], before temperature
    seeds: Tensor  # [slots]
    longest: int | None = None  # upper bound of the texts' lengths in tokens
    raw_logits: Tensor | None = field(default=None, init=False)  # [N, V] of the chunk, before any processor
    requests: slice = field(default_factory=lambda: slice(0, 0), init=False)  # of the chunk
    rows: slice = field(default_factory=lambda: slice(0, 0), init=False)  # of the chunk

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)

    def begin_chunk(self, raw_logits: Tensor, num_requests: int) -> None:
        """Advance to vLLM's next chunk of requests, whether or not any of them uses a rule."""
        self.raw_logits = raw_logits
        self.requests = slice(self.requests.stop, self.requests.stop + num_requests)
        self.rows = slice(self.rows.stop, self.rows.stop + len(raw_logits))

    def hidden(self, *, ahead: int = 0) -> Tensor:
        """Return the hidden states `ahead` rows after each of the chunk's rows, [N, D]; past the end, the last one."""
        assert self.states is not None
        rows = torch.arange(self.rows.start + ahead, self.rows.stop + ahead, device=self.states.device)
        return self.states[rows.clamp_max(len(self.states) - 1)]

    def draft_scores(self, ctx: LogitsContext) -> Tensor | None:
        """The logits that each row's drafted token was drawn from, [N, V]; None where the drafter keeps none."""
        if self.draft_logits is None:
            return None
        steps = ctx.expanded_local_pos.long().clamp_max(self.draft_logits.shape[1] - 1)
        return self.draft_logits[ctx.expanded_idx_mapping.long(), steps].float()

    def uniforms(self, ctx: LogitsContext) -> Tensor:
        """The draws that vLLM's rejection sampler will use, [N]."""
        return uniforms_of(self.seeds, ctx.expanded_idx_mapping, ctx.pos)

    def noise(self, ctx: LogitsContext) -> Tensor:
        """Return the draws for randomized rules, [N]; they depend on seed and position, not on other requests."""
        return uniforms_of(self.seeds ^ NOISE_KEY, ctx.expanded_idx_mapping, ctx.pos)


@triton.jit
def _uniforms_kernel(uniforms, seeds, slots, positions):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    seed = tl.load(seeds + tl.load(slots + row).to(tl.int64))
    tl.store(uniforms + row, tl_rand32(seed, tl.load(positions + row), includes_zero=False))


def uniforms_of(seeds: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Return the draw that accepts or rejects at each row, [N] in (0, 1): vLLM's sampler draws the same later.

    Args:
        seeds: [slots], one for each request.
        slots: [N], the request slot of each row.
        positions: [N], the position of each row in its text.
    """
    drawn = torch.empty(len(positions), dtype=torch.float32, device=positions.device)
    kernel: Any = _uniforms_kernel
    kernel[(len(positions),)](drawn, seeds, slots, positions, num_warps=1)
    return drawn


@dataclass
class Chunk:
    """The decisions on the rows of logits that vLLM verifies together, bonus rows included."""

    decisions: Decisions
    request_ids: list[str]
    requests: list[BatchRequest]
    block_sizes: list[int]  # rows by request: the bonus row is padding


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

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Register a request in its slot; return whether a rule may change its logits."""
        request_id = self.runner.req_states.index_to_req_id.get(req_idx)
        if request_id is None:  # no request in this slot, as in the self-test
            request_id = f"slot {req_idx}"
            self.rules.forget([request_id])
        self._slots[req_idx] = known = self.rules.admit(request_id, lambda: request_settings(sampling_params))
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

    def begin_chunk(self, raw_logits: Tensor, num_requests: int) -> None:
        """Start vLLM's next chunk of requests; `apply` follows only if one of them needs its logits processed."""
        self.chunk = None
        if self.round is not None:
            self.round.begin_chunk(raw_logits, num_requests)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Lift the drafted tokens that a rule accepts."""
        if (current := self.round) is None:
            return logits
        with self.rules.guarded():
            sizes = [int(count) for count in current.num_rows[current.requests]]
            requests = [
                self.rules.in_force(
                    self._slots.get(slot) or RequestRules(Choice("", STRICT), RiskBudget()),
                    size - 1,
                    current.num_requests,
                    greedy=self._greedy(slot),
                )
                for slot, size in zip(ctx.idx_mapping_np.tolist(), sizes, strict=True)
            ]
            token_ids = judged_ids(ctx)
            decisions = self.rules.decide(requests, lambda: self._batch(logits, ctx, token_ids, requests, current))
            if decisions is not None:
                self.chunk = Chunk(decisions, current.request_ids[current.requests], requests, sizes)
                _lift(logits, token_ids, decisions.accept)
        return logits

    def _batch(
        self, logits: Tensor, ctx: LogitsContext, judged: Tensor, requests: list[BatchRequest], current: V2Round
    ) -> Batch:
        """Return the chunk's tensors that the rules need; vLLM's row r verifies the token fed at row r + 1."""
        needs = self.rules.menu.needs
        token_ids = judged.clamp_min(0)
        sampling = not all(request.greedy for request in requests)
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
            states, slots = self.runner.req_states, ctx.idx_mapping.long()
            token_ids_of_texts = states.all_token_ids.gpu[slots, : current.longest]
            given["context"] = Context(token_ids_of_texts, states.total_len.gpu[slots].long())
        if Need.ANSWER_POSITIONS in needs:
            prompts = self.runner.req_states.prompt_len.gpu[ctx.expanded_idx_mapping.long()]
            given["answer_positions"] = ctx.pos.long() + 1 - prompts
        if Need.EMBEDDINGS in needs:
            embed = self.runner.model.embed_input_ids
            given |= {"token_embeddings": embed(token_ids), "top_embeddings": embed(logits.argmax(-1))}
        raw = current.raw_logits if self.rules.menu.reads_raw_logits else None
        return Batch(
            token_ids=judged,
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
