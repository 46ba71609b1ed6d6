"""Wrappers around the rejection sampler of vLLM's V1 runner.

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
from typing import Any, Protocol

import torch
from torch import Tensor

from reprieve.rules.batch import Batch, BatchRequest, Decisions
from reprieve.transfers import device_tensor
from reprieve.types import gather_token
from reprieve.vllm_plugin.rounds import RoundRequest, WorkerRules


class RunnerHooks(Protocol):
    """Hooks on a model runner, as the sampler uses them."""

    rules: WorkerRules

    def requests(self, num_draft_tokens: list[int]) -> list[RoundRequest]: ...
    def batch(
        self,
        current: V1Round,
        requests: list[RoundRequest],
        target_logits: Tensor,
        draft_probs: Tensor | None,
        meta: Any,
    ) -> Batch: ...


@dataclass
class V1Round:
    """State of the round that is being sampled."""

    hooks: RunnerHooks
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
    def sample(token_ids: Tensor, probs: Tensor | None, logits: Tensor) -> Tensor:
        return original(
            token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            probs,
            logits,
            bonus_token_ids,
            sampling_metadata,
            *rest,
            **more,
        )

    current = ROUND.get()
    if current is None:
        return sample(draft_token_ids, draft_probs, target_logits)
    rules, hooks = current.hooks.rules, current.hooks
    requests = hooks.requests(num_draft_tokens)
    rows = rules.batch_requests(requests)
    if not sampling_metadata.all_greedy and not all(row.strict for row in rows):
        current.uniforms = _unwrapped("generate_uniform_probs")(
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
    rules.count(requests, rows, decisions, output)
    return output


def _unwrapped(name: str) -> Callable[..., Tensor]:
    from vllm.v1.sample import rejection_sampler

    function: Callable[..., Tensor] = inspect.unwrap(getattr(rejection_sampler, name))
    return function


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
