"""The self-test on the V2 runner: requests with a drafted token each, through vLLM's own sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprieve.vllm_plugin.selftest import ASKED, DRAFTED, OWN, certain_logits
from reprieve.vllm_plugin.v2.round import V2Round


def try_out(hooks: Any, size: int) -> list[tuple[int, int]]:
    """Greedy and sampled, one request after the other: a server may have a single slot."""
    try:
        return [
            (_token(hooks, size, ASKED[0], temperature), _token(hooks, size, ASKED[1], temperature))
            for temperature in (0.0, 0.7)
        ]
    finally:
        hooks.processor.round = hooks.processor.chunk = None
        hooks.processor.forget_slots()


def _token(hooks: Any, size: int, asked: dict[str, str], temperature: float) -> int:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    sampler, device = hooks.runner.sampler, hooks.runner.device
    sampler.add_request(0, SamplingParams(temperature=temperature, seed=0, extra_args=dict(asked)))
    sampler.apply_staged_writes()

    def rows(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    slots, row_slots, places = rows([0]), rows([0, 0]), rows([0, 1])
    positions, fed = rows([5, 6], torch.int64), rows([OWN, DRAFTED])
    states = sampler.sampling_states
    hooks.processor.round = V2Round(["self-test"], np.array([2]), None, None, states.seeds.gpu)
    hosts = np.array([0])
    processed = sampler.apply_sampling_params(
        certain_logits(2, size, device), row_slots, slots, hosts, positions, fed, places, np.array([7])
    )
    sampled, _ = rejection_sampler.rejection_sample(
        processed,
        None,
        fed,
        rows([0, 2]),
        positions,
        slots,
        row_slots,
        places,
        states.temperature.gpu,
        states.seeds.gpu,
        hooks.runner.num_speculative_steps,
    )
    return int(sampled[0, 0])
