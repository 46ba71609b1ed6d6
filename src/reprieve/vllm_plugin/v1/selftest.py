"""The self-test on the V1 runner: two requests with a drafted token each, through vLLM's own rejection sampler."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reprieve.rules.batch import Batch
from reprieve.vllm_plugin.rounds import RoundRequest
from reprieve.vllm_plugin.selftest import ASKED, DRAFTED, certain_logits
from reprieve.vllm_plugin.v1.sampler import ROUND, V1Round


def try_out(hooks: Any, size: int) -> list[tuple[int, int]]:
    """Both requests in one batch."""
    from vllm.v1.sample import rejection_sampler

    device = hooks.runner.device
    names = ["reprieve self-test 0", "reprieve self-test 1"]
    hooks.rules.note_drafts(names, None)
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

    fake: Any = SimpleNamespace(rules=hooks.rules, requests=lambda counts: requests, batch=batch)
    meta = SimpleNamespace(all_greedy=True, all_random=False, temperature=None, generators={}, top_k=None, top_p=None)
    token = ROUND.set(V1Round(fake, state=None))
    try:
        output = rejection_sampler.rejection_sample(
            drafts, [1, 1], 1, ends, None, certain_logits(2, size, device), bonus, meta
        )
    finally:
        ROUND.reset(token)
    return [(int(output[0, 0]), int(output[1, 0]))]
