"""Hooks on vLLM's V1 model runner: record drafts, wrap the rejection sampler, and attach counts to the output.

If the rule accepts a drafted token, its target logit is set to the largest finite value before the sampler runs, and
restored afterwards. If a replacing rule refuses a token, the sampler gets a proposal that it must reject. vLLM itself
still produces recovered and bonus tokens, random numbers, statistics and logprobs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reprieve.rules.batch import Batch, BatchRequest, Decisions
from reprieve.transfers import device_tensor, to_device
from reprieve.types import Context, Need, gather_token
from reprieve.vllm_plugin import metrics
from reprieve.vllm_plugin.probing import ASKED, DRAFTED, certain_logits
from reprieve.vllm_plugin.rounds import RoundRequest, WorkerRules, request_settings


class Hooks:
    """The hooks on one model runner."""

    def __init__(self, rules: WorkerRules, runner: Any) -> None:
        self.rules = rules
        self.runner = runner
        self._reads_draft = Need.DRAFT_PROBS in rules.menu.needs
        self._recorded: list[Tensor] = []

    def install(self) -> None:
        """Wrap this runner's methods, its drafter's, and the sampler's functions."""
        runner = self.runner
        patch_sampler()
        sample_tokens, propose = runner.sample_tokens, runner.propose_draft_token_ids
        copy_drafts = runner._copy_draft_token_ids_to_cpu

        def sample(grammar_output: Any) -> Any:
            with self._round():
                output = sample_tokens(grammar_output)
            metrics.attach(getattr(output, "_model_runner_output", output), self.rules)
            return output

        def propose_drafts(*args: Any, **kwargs: Any) -> Any:
            self._recorded = []
            drafts = propose(*args, **kwargs)
            probs = torch.stack(self._recorded, dim=1) if self._recorded else None  # [B, K, V]
            self.rules.note_drafts(runner.input_batch.req_ids, probs)
            return drafts

        def copy(scheduler_output: Any, zeros_only: bool = False) -> Any:
            if zeros_only:  # near the maximum length vLLM skips the drafter and uses zeros as drafts
                self.rules.note_drafts(runner.input_batch.req_ids, None, real=False)
            return copy_drafts(scheduler_output, zeros_only)

        runner.sample_tokens, runner.propose_draft_token_ids = sample, propose_drafts
        runner._copy_draft_token_ids_to_cpu = copy
        if self._reads_draft:
            self._record_drafts(runner.drafter)

    def try_out(self, size: int) -> list[tuple[int, int]]:
        """Return the self-test's token pairs: one token from a request with the rule, one from a request without.

        Both requests, with a drafted token each, are in one batch.
        """
        from vllm.v1.sample import rejection_sampler

        device = self.runner.device
        names = ["reprieve self-test 0", "reprieve self-test 1"]
        self.rules.note_drafts(names, None)
        drafts = torch.full((2,), DRAFTED, dtype=torch.int32, device=device)
        ends = torch.tensor([1, 2], dtype=torch.int32, device=device)
        bonus = torch.zeros(2, 1, dtype=torch.int32, device=device)
        possible = torch.ones(2, dtype=torch.bool, device=device)
        requests = [
            RoundRequest(name, 1, True, functools.partial(dict, settings))
            for name, settings in zip(names, ASKED, strict=True)
        ]

        def batch(current: Any, requests: Any, logits: Tensor, probs: Any, meta: Any) -> Batch:
            return Batch(token_ids=drafts.long(), block_sizes=[1, 1], scores=logits, logits=logits, possible=possible)

        fake: Any = SimpleNamespace(rules=self.rules, requests=lambda counts: requests, batch=batch)
        meta = SimpleNamespace(
            all_greedy=True, all_random=False, temperature=None, generators={}, top_k=None, top_p=None
        )
        token = ROUND.set(V1Round(fake, state=None))
        try:
            output = rejection_sampler.rejection_sample(
                drafts, [1, 1], 1, ends, None, certain_logits(2, size, device), bonus, meta
            )
        finally:
            ROUND.reset(token)
        return [(int(output[0, 0]), int(output[1, 0]))]

    def _record_drafts(self, drafter: Any) -> None:
        """Keep the distribution of each drafted token, which vLLM itself drops in greedy batches."""
        sample_draft = drafter._sample_draft_tokens

        def sample(hidden_states: Tensor, sampling_metadata: Any) -> Any:
            if drafter._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy:
                token_ids, probs = sample_draft(hidden_states, sampling_metadata)
                self._recorded.append(probs)
                return token_ids, probs
            logits = drafter.model.compute_logits(hidden_states)
            self._recorded.append(logits.softmax(-1, dtype=torch.float32))
            return logits.argmax(-1), None

        drafter._sample_draft_tokens = sample

    @contextmanager
    def _round(self) -> Iterator[None]:
        state = self.runner.execute_model_state
        if state is not None:
            self.rules.forget(state.scheduler_output.finished_req_ids)
        drafted = state is not None and state.spec_decode_metadata is not None
        token = ROUND.set(V1Round(self, state) if drafted else None)
        try:
            yield
        finally:
            ROUND.reset(token)
            self.rules.forget_all_but(self.runner.requests)

    def requests(self, num_draft_tokens: list[int]) -> list[RoundRequest]:
        """The batch in vLLM's order, which changes from round to round."""
        batch = self.runner.input_batch
        return [
            RoundRequest(
                request_id=request_id,
                num_drafted=num_drafted,
                greedy=request_id in batch.greedy_reqs,
                settings=functools.partial(self._settings, request_id),
            )
            for request_id, num_drafted in zip(batch.req_ids, num_draft_tokens, strict=True)
        ]

    def _settings(self, request_id: str) -> Any:
        return request_settings(self.runner.requests[request_id].sampling_params)

    def _context(self, num_requests: int, device: torch.device) -> Context:
        """Prompts and committed tokens, which lie on the host."""
        batch = self.runner.input_batch
        lengths = torch.as_tensor(batch.num_tokens_no_spec[:num_requests], dtype=torch.long)
        token_ids = torch.from_numpy(batch.token_ids_cpu[:num_requests, : max(lengths.tolist())])
        return Context(to_device(token_ids, device), to_device(lengths, device))

    def batch(
        self,
        current: V1Round,
        requests: list[RoundRequest],
        target_logits: Tensor,
        draft_probs: Tensor | None,
        meta: Any,
    ) -> Batch:
        """The round's tensors, as far as the rule reads them."""
        needs = self.rules.menu.needs
        state = current.state
        token_ids = state.spec_decode_metadata.draft_token_ids.long()
        judging = state.spec_decode_metadata.target_logits_indices
        hidden = state.sample_hidden_states
        assert current.possible is not None
        proposal = None if draft_probs is None else gather_token(draft_probs, token_ids.clamp_min(0))
        embeddings = {}
        if Need.EMBEDDINGS in needs:  # every rank must call this
            embed = self.runner.get_model().embed_input_ids
            drafted, best = token_ids.clamp_min(0), target_logits.argmax(-1)
            embeddings = {"token_embeddings": embed(drafted), "top_embeddings": embed(best)}
        return Batch(
            token_ids=token_ids,
            block_sizes=[request.num_drafted for request in requests],
            scores=target_logits,
            logits=state.logits[judging].float() if self.rules.menu.reads_raw_logits else target_logits,
            possible=current.possible,
            proposal_probs=proposal,
            draft_scores=self._draft_scores(requests, target_logits, meta) if self._reads_draft else None,
            uniforms=current.uniforms,
            noise=self.rules.noise(len(token_ids), token_ids.device),
            node_hidden={-1: hidden[judging + 1]} if Need.NODE_HIDDEN in needs else None,
            parent_hidden={-1: hidden[judging]} if Need.PARENT_HIDDEN in needs else None,
            context=self._context(len(requests), token_ids.device) if Need.CONTEXT in needs else None,
            answer_positions=self._answer_positions(requests, token_ids.device)
            if Need.ANSWER_POSITIONS in needs
            else None,
            num_draft_tokens=self.runner.speculative_config.num_speculative_tokens,
            **embeddings,
        )

    def _answer_positions(self, requests: list[RoundRequest], device: torch.device) -> Tensor:
        batch = self.runner.input_batch
        lengths = batch.num_tokens_no_spec - batch.num_prompt_tokens
        positions = [
            int(lengths[row]) + column for row, request in enumerate(requests) for column in range(request.num_drafted)
        ]
        return device_tensor(positions, torch.long, device)

    def _draft_scores(self, requests: list[RoundRequest], target_logits: Tensor, meta: Any) -> Tensor:
        """Return the draft's scores, [N, V], with each request's temperature, top-k and top-p, as for the target."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        scores = self.rules.flat_draft_probs(requests, target_logits).log()
        if meta.all_greedy:
            return scores
        counts = device_tensor([request.num_drafted for request in requests], torch.long, scores.device)

        def by_token(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.repeat_interleave(counts, output_size=len(scores))

        if not self.runner.drafter._enable_probabilistic_draft_probs:
            temperature = by_token(meta.temperature)
            assert temperature is not None
            scores = scores / torch.where(temperature == 0, 1.0, temperature).unsqueeze(-1)
        kept: Tensor = apply_top_k_top_p(scores, by_token(meta.top_k), by_token(meta.top_p))
        return kept


@dataclass
class V1Round:
    """State of the round that is being sampled."""

    hooks: Hooks
    state: Any  # vLLM's ExecuteModelState
    possible: Tensor | None = None  # [N], captured before top-k and top-p
    uniforms: Tensor | None = None  # [N], drawn ahead for the rule, then used by vLLM


# vLLM's sampling functions are module-level, not runner methods: their wrappers find the current round here.
ROUND: ContextVar[V1Round | None] = ContextVar("reprieve_round", default=None)


def patch_sampler() -> None:
    """Wrap vLLM's sampling functions, once per process; outside a round the wrappers only call the originals."""
    from vllm.v1.sample import rejection_sampler as module

    if hasattr(module.rejection_sample, "__wrapped__"):
        return
    for name, wrapper in (
        ("rejection_sample", _rejection_sample),
        ("apply_sampling_constraints", _apply_sampling_constraints),
        ("generate_uniform_probs", _generate_uniform_probs),
    ):
        original = getattr(module, name)
        setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))


def _apply_sampling_constraints(original: Callable[..., Tensor], logits: Tensor, *rest: Any) -> Tensor:
    """Record which drafted tokens are not masked (logit above -inf), before top-k and top-p are applied."""
    current = ROUND.get()
    if current is not None:
        token_ids = current.state.spec_decode_metadata.draft_token_ids.long().clamp_min(0)
        current.possible = gather_token(logits, token_ids) > -math.inf
    return original(logits, *rest)


def _generate_uniform_probs(original: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return the draws that the rule has already read, or new ones."""
    current = ROUND.get()
    return original(*args) if current is None or current.uniforms is None else current.uniforms


def _rejection_sample(
    original: Callable[..., Tensor],
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: Any,
    *rest: Any,
    **more: Any,
) -> Tensor:
    from vllm.v1.sample import rejection_sampler

    counts = (num_draft_tokens, max_spec_len, cu_num_draft_tokens)

    def sample(token_ids: Tensor, probs: Tensor | None, logits: Tensor) -> Tensor:
        return original(token_ids, *counts, probs, logits, bonus_token_ids, sampling_metadata, *rest, **more)

    current = ROUND.get()
    if current is None:
        return sample(draft_token_ids, draft_probs, target_logits)
    rules, hooks = current.hooks.rules, current.hooks
    requests = hooks.requests(num_draft_tokens)
    rows = rules.batch_requests(requests)
    if not sampling_metadata.all_greedy and not all(row.strict for row in rows):
        draw = inspect.unwrap(rejection_sampler.generate_uniform_probs)
        current.uniforms = draw(
            len(draft_token_ids), num_draft_tokens, sampling_metadata.generators, target_logits.device
        )
    decisions = rules.decide(
        rows, lambda: hooks.batch(current, requests, target_logits, draft_probs, sampling_metadata)
    )
    if decisions is None:
        return sample(draft_token_ids, draft_probs, target_logits)
    token_ids, probs = draft_token_ids, draft_probs
    if any(rule.traits.replaces for rule in rules.menu.rules):
        token_ids, probs = _refuse(decisions, rows, draft_token_ids, draft_probs, target_logits, sampling_metadata)
    with _lifted(decisions, draft_token_ids, target_logits) as logits:
        output = sample(token_ids, probs, logits)
    request_ids = [request.request_id for request in requests]
    rules.count(request_ids, rows, num_draft_tokens, decisions.lossless, (output >= 0).sum(-1) - 1)
    return output


@contextmanager
def _lifted(decisions: Decisions, draft_token_ids: Tensor, target_logits: Tensor) -> Iterator[Tensor]:
    """Yield logits in which accepted tokens always win; restore them afterwards, since logprobs are read from them."""
    logits = target_logits if decisions.scores is None else decisions.scores
    columns = draft_token_ids.long().clamp_min(0).unsqueeze(-1)
    before = logits.gather(-1, columns)
    highest = torch.finfo(logits.dtype).max
    logits.scatter_(-1, columns, torch.where(decisions.accept.unsqueeze(-1), highest, before))
    try:
        yield logits
    finally:
        logits.scatter_(-1, columns, before)


def _refuse(
    decisions: Decisions,
    rows: Sequence[BatchRequest],
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    meta: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return proposals that vLLM must reject wherever the rule refused a token.

    When sampling, the draft's probabilities there become 0: vLLM rejects the token and samples from the target's own
    distribution. When greedy, the token is replaced by one other than the target's argmax: vLLM emits the argmax.
    """
    vocab_size = target_logits.shape[-1]
    token_ids = draft_token_ids
    if not meta.all_random:
        other = ((target_logits.argmax(-1) + 1) % vocab_size).to(draft_token_ids.dtype)
        refused = decisions.refuse
        if not meta.all_greedy:
            greedy = [row.greedy for row in rows for _ in range(row.num_drafted)]
            refused = refused & device_tensor(greedy, torch.bool, refused.device)
        token_ids = torch.where(refused, other, draft_token_ids)
    if meta.all_greedy:
        return token_ids, draft_probs
    if draft_probs is None:
        certain = draft_token_ids.long().clamp_min(0)
        draft_probs = torch.nn.functional.one_hot(certain, vocab_size).to(target_logits.dtype)
    return token_ids, draft_probs.masked_fill(decisions.refuse.unsqueeze(-1), 0.0).contiguous()
