"""Hooks on vLLM's V2 model runner: collect a round's inputs besides logits, and attach counts to its output.

`RuleProcessor` applies the rules. Wrappers supply the rest: `runner.sample_tokens`, for the batch and hidden states;
`runner.finish_requests`, to drop the state of finished requests; `sampler.apply_sampling_params`, for each chunk and
its raw logits; `rejection_sample`, for counts and for decisions that a logits processor cannot express (refusing a
token that the target would have chosen).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprieve.errors import ReprieveError
from reprieve.types import Need
from reprieve.vllm_plugin import metrics
from reprieve.vllm_plugin.probing import ASKED, DRAFTED, OWN, certain_logits
from reprieve.vllm_plugin.v2_processor import Chunk, RuleProcessor, V2Round, uniforms_of

# vLLM forces a token when a thinking budget is spent: its logit is 1e9 over the temperature (at most 2). The logit of
# an accepted token is about `v2_processor.LIFT` over the temperature (at least 0.01).
_FORCED = 5e6
_POSITIONS = range(5, 21)  # of the self-test; 16 draws agree by chance once in 65,536 servers


class Hooks(RuleProcessor):
    """The processor, with the hooks on one model runner that supply its other inputs."""

    def install(self) -> None:
        """Add the processor to the runner's sampler, and wrap the functions that supply its other inputs.

        Raises:
            ReprieveError: the runner has no `execute_model_state`, or uses prefill context parallelism.
        """
        runner = self.runner
        if not hasattr(runner, "execute_model_state"):
            raise ReprieveError("vLLM's V2 model runner has no execute_model_state: this vLLM does not fit the plugin")
        if getattr(runner, "pcp_manager", None) is not None:
            raise ReprieveError("rules do not support prefill context parallelism, which reorders batches: turn it off")
        runner.sampler.logits_processors.append(self)
        sample_tokens, finish = runner.sample_tokens, runner.finish_requests

        @functools.wraps(sample_tokens)
        def sample_round(*args: Any, **kwargs: Any) -> Any:
            state = runner.execute_model_state
            patch_rejection(self)
            if state is not None:
                self._begin(state.hidden_states, state.input_batch)
            try:
                output = sample_tokens(*args, **kwargs)
            finally:
                self._end()
            _when_ready(output, lambda made: metrics.attach(made, self.rules))
            return output

        @functools.wraps(finish)
        def finish_requests(scheduler_output: Any) -> Any:
            self.rules.forget(scheduler_output.finished_req_ids)
            return finish(scheduler_output)

        runner.sample_tokens, runner.finish_requests = sample_round, finish_requests
        self._watch_chunks(runner.sampler)

    def try_out(self, size: int) -> list[tuple[int, int]]:
        """Return the self-test's token pairs: one token from a request with the rule, one from a request without.

        Each request, with one drafted token, runs greedy and sampled, alone because a server may have a single slot.

        Raises:
            ReprieveError: vLLM's accept decisions use other random numbers than `uniforms_of` returns.
        """
        patch_rejection(self)
        try:
            _require_known_draws(self, size)
            return [
                (_token(self, size, ASKED[0], temperature)[0], _token(self, size, ASKED[1], temperature)[0])
                for temperature in (0.0, 0.7)
            ]
        finally:
            self._end()
            self.forget_slots()

    def _begin(self, hidden_states: Tensor, input_batch: Any) -> None:
        if input_batch.num_draft_tokens == 0 or input_batch.num_reqs == 0:
            return
        needs = self.rules.menu.needs
        reads_states = {Need.NODE_HIDDEN, Need.PARENT_HIDDEN} & needs
        lengths = getattr(input_batch, "seq_lens_cpu_upper_bound", None)
        self.round = V2Round(
            request_ids=list(input_batch.req_ids),
            num_rows=np.diff(input_batch.cu_num_logits_np),
            states=hidden_states[input_batch.logits_indices] if reads_states else None,
            draft_logits=getattr(self.runner.speculator, "draft_logits", None),
            seeds=self.runner.sampler.sampling_states.seeds.gpu,
            longest=None if lengths is None else int(lengths.max()),
        )

    def _end(self) -> None:
        self.round = self.chunk = None

    def _watch_chunks(self, sampler: Any) -> None:
        """Record each chunk that vLLM verifies, with its logits before the requests' penalties and masks."""
        apply = sampler.apply_sampling_params

        @functools.wraps(apply)
        def watched(
            logits: Tensor,
            expanded_idx_mapping: Tensor,
            idx_mapping: Tensor,
            idx_mapping_np: Any,
            *rest: Any,
            **more: Any,
        ) -> Tensor:
            self.begin_chunk(logits, len(idx_mapping_np))
            output: Tensor = apply(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest, **more)
            return output

        sampler.apply_sampling_params = watched


def _when_ready(output: Any, then: Callable[[Any], None]) -> None:
    """Call `then` on a runner's output: at once, or after vLLM has fetched an asynchronous output."""
    fetch = getattr(output, "get_output", None)
    if fetch is None:
        if output is not None:
            then(output)
        return

    def get_output() -> Any:
        fetched = fetch()
        then(fetched)
        return fetched

    output.get_output = get_output


def patch_rejection(processor: RuleProcessor) -> None:
    """Wrap vLLM's `rejection_sample`, once per process; the wrapper uses the processor passed last.

    Every round passes its own, because one process can hold several engines.
    """
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

    if hasattr(module.rejection_sample, "__wrapped__"):
        module.rejection_sample.reprieve[0] = processor
        return
    original, current = module.rejection_sample, [processor]

    @functools.wraps(original)
    def rejection_sample(
        target_logits: Tensor, draft_logits: Any, draft_sampled: Tensor, *rest: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        chunk = current[0].chunk
        if chunk is None:
            plain: tuple[Tensor, Tensor] = original(target_logits, draft_logits, draft_sampled, *rest, **more)
            return plain
        with current[0].rules.guarded():
            target_logits, draft_sampled = _refused(chunk, target_logits, draft_sampled)
        sampled, num_sampled = original(target_logits, draft_logits, draft_sampled, *rest, **more)
        accepted = num_sampled.long() - 1  # the last is vLLM's own token
        current[0].rules.count(chunk.request_ids, chunk.requests, chunk.block_sizes, chunk.decisions.lossless, accepted)
        return sampled, num_sampled

    rejection_sample.reprieve = current  # type: ignore[attr-defined]
    module.rejection_sample = rejection_sample


def _refused(chunk: Chunk, target_logits: Tensor, draft_sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Return vLLM's inputs, changed where a rule refuses a token or verifies against another distribution."""
    decisions = chunk.decisions
    if decisions.scores is not None:
        relaxed = decisions.relaxed & (target_logits.amax(-1) < _FORCED)
        target_logits = torch.where(relaxed.unsqueeze(-1), decisions.scores, target_logits)
    refused = torch.zeros_like(decisions.refuse)
    refused[1:] = decisions.refuse[:-1]  # row r judges what row r + 1 was fed
    return target_logits, draft_sampled.masked_fill(refused, -1)


def _require_known_draws(hooks: Hooks, size: int) -> None:
    """Check that `uniforms_of` gives vLLM's own draws, since randomized rules read them ahead.

    A token of target probability 1/2 must be accepted exactly if its draw is below 1/2.
    """
    for position in _POSITIONS:
        token, uniform = _token(hooks, size, ASKED[1], 1.0, equal=True, position=position)
        if (token == DRAFTED) != (uniform < 0.5):
            raise ReprieveError(f"vLLM decides by other random numbers than Reprieve reads (position {position})")


def _token(
    hooks: Hooks, size: int, settings: dict[str, str], temperature: float, *, equal: bool = False, position: int = 5
) -> tuple[int, float]:
    """Return the token that vLLM's sampler emits, and its draw from `uniforms_of`.

    Args:
        equal: give the drafted token the same target logit as the target's own token.
        position: position in the text of the row that verifies the drafted token.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    sampler, device = hooks.runner.sampler, hooks.runner.device
    sampler.add_request(0, SamplingParams(temperature=temperature, seed=0, extra_args=dict(settings)))
    sampler.apply_staged_writes()

    def rows(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    logits = certain_logits(2, size, device)
    if equal:
        logits[:, DRAFTED] = logits[:, OWN]
    slots, row_slots, columns = rows([0]), rows([0, 0]), rows([0, 1])
    positions, fed = rows([position, position + 1], torch.int64), rows([OWN, DRAFTED])
    states = sampler.sampling_states
    hooks.round = V2Round(["self-test"], np.array([2]), None, None, states.seeds.gpu)
    hosts = np.array([0])
    processed = sampler.apply_sampling_params(logits, row_slots, slots, hosts, positions, fed, columns, np.array([7]))
    sampled, _ = rejection_sampler.rejection_sample(
        processed,
        None,
        fed,
        rows([0, 2]),
        positions,
        slots,
        row_slots,
        columns,
        states.temperature.gpu,
        states.seeds.gpu,
        hooks.runner.num_speculative_steps,
    )
    return int(sampled[0, 0]), float(uniforms_of(states.seeds.gpu, row_slots, positions)[0])
