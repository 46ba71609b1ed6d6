"""The self-test on the V2 runner: requests with a drafted token each, through vLLM's own sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprieve.errors import ReprieveError
from reprieve.vllm_plugin.selftest import ASKED, DRAFTED, OWN, certain_logits
from reprieve.vllm_plugin.v2.round import V2Round
from reprieve.vllm_plugin.v2.uniforms import uniforms_of

_POSITIONS = range(5, 21)  # 16 draws agree by chance once in 65,536 servers


def try_out(hooks: Any, size: int) -> list[tuple[int, int]]:
    """Run each request greedy and sampled, one at a time because a server may have a single slot.

    Raises:
        ReprieveError: vLLM's accept decisions use other random numbers than `uniforms_of` returns.
    """
    try:
        _require_known_draws(hooks, size)
        return [
            (_token(hooks, size, ASKED[0], temperature)[0], _token(hooks, size, ASKED[1], temperature)[0])
            for temperature in (0.0, 0.7)
        ]
    finally:
        hooks.processor.round = hooks.processor.chunk = None
        hooks.processor.forget_slots()


def _require_known_draws(hooks: Any, size: int) -> None:
    """Check that `uniforms_of` gives vLLM's own draws, since randomized rules read them ahead.

    A token of target probability 1/2 must be accepted exactly if its draw is below 1/2.
    """
    for position in _POSITIONS:
        token, uniform = _token(hooks, size, ASKED[1], 1.0, equal=True, position=position)
        if (token == DRAFTED) != (uniform < 0.5):
            raise ReprieveError(f"vLLM decides by other random numbers than Reprieve reads (position {position})")


def _token(
    hooks: Any, size: int, settings: dict[str, str], temperature: float, *, equal: bool = False, position: int = 5
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
    hooks.processor.round = V2Round(["self-test"], np.array([2]), None, None, states.seeds.gpu)
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
