"""Hooks on vLLM's V1 model runner: record drafts, collect a round's tensors, and attach counts to its output."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reprieve.needs import Need
from reprieve.rules.batch import Batch
from reprieve.transfers import device_tensor, to_device
from reprieve.types import Context, gather_token
from reprieve.vllm_plugin import metrics
from reprieve.vllm_plugin.rounds import RoundRequest, WorkerRules, request_settings
from reprieve.vllm_plugin.selftest import ASKED, DRAFTED, certain_logits
from reprieve.vllm_plugin.v1.sampler import ROUND, V1Round, patch_sampler


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
