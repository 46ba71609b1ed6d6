"""At start, inside the worker: an edit that must be accepted is, and a request that asked for nothing is not touched.

Two made-up requests with one drafted token each go through vLLM's own sampler and the hooks as they are installed. The
rule is one that accepts everything; the target prefers another token.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprieve.backends.request_fields import SWITCH
from reprieve.errors import ReprieveError, SpecError
from reprieve.needs import Need
from reprieve.rules import parse_rule
from reprieve.vllm_plugin.batch import Batch
from reprieve.vllm_plugin.menu import Menu
from reprieve.vllm_plugin.policy import Policy
from reprieve.vllm_plugin.rounds import RoundRequest, WorkerRules

OWN, DRAFTED = 1, 2  # the target's token, and the drafter's
_ASKED: tuple[dict[str, str], ...] = ({}, {SWITCH: "off"})


def require_works(hooks: Any, kind: str) -> None:
    """Run it on a runner's hooks.

    Raises:
        ReprieveError: the hooks do not do what they must, in this vLLM.
    """
    rules, size = hooks.rules, int(hooks.runner.model_config.get_vocab_size())
    hooks.rules = WorkerRules(Menu([Policy(parse_rule(f"top_k:k={size}"))]), rank=rules.rank)
    try:
        for relaxed, untouched in [_v1(hooks, size)] if kind == "v1" else _v2(hooks, size):
            if hooks.rules.failures:
                raise ReprieveError("the rule raised an error, see the log")
            if relaxed != DRAFTED:
                raise ReprieveError(f"a drafted token that the rule accepts was rejected (got {relaxed})")
            if untouched != OWN:
                raise ReprieveError(f"a request with the rule switched off was changed (got {untouched})")
    except ReprieveError as error:
        raise ReprieveError(f"Reprieve's self-test failed in worker {rules.rank}: {error}") from None
    except Exception as error:  # another vLLM may fail in any way
        raise ReprieveError(f"Reprieve's self-test failed in worker {rules.rank}: {error!r}") from error
    finally:
        hooks.rules = rules


def require_last_states(runner: Any, menu: Menu) -> None:
    """Refuse heads where the model hands out states before its last norm: they were trained on those behind it.

    Some models of vLLM (MiMo) take the norm when they compute logits, which twice the state then leaves as they are.

    Raises:
        SpecError: names the model.
    """
    if not {Need.NODE_HIDDEN, Need.PARENT_HIDDEN} & menu.needs:
        return
    model, config = runner.get_model(), runner.model_config
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(1, config.get_hidden_size(), generator=draw).to(runner.device, config.dtype)
    once, twice = model.compute_logits(states), model.compute_logits(2 * states)
    if once is not None and torch.allclose(once.float(), twice.float(), rtol=0.02, atol=1e-3):
        raise SpecError(
            f"{type(model).__name__} hands out its hidden states before the last norm, and heads read those behind it: "
            "serve a rule without heads"
        )


def _logits(num_rows: int, size: int, device: torch.device) -> Tensor:
    logits = torch.zeros(num_rows, size, device=device)
    logits[:, OWN] = 30.0  # certain, sampled or not
    return logits


def _v1(hooks: Any, size: int) -> tuple[int, int]:
    from vllm.v1.sample import rejection_sampler

    from reprieve.vllm_plugin.v1.sampler import ROUND, V1Round

    device = hooks.runner.device
    names = ["reprieve self-test 0", "reprieve self-test 1"]
    hooks.rules.note_drafts(names, None)
    drafts = torch.full((2,), DRAFTED, dtype=torch.int32, device=device)
    ends = torch.tensor([1, 2], dtype=torch.int32, device=device)
    bonus = torch.zeros(2, 1, dtype=torch.int32, device=device)
    possible = torch.ones(2, dtype=torch.bool, device=device)
    requests = [
        RoundRequest(name, 1, True, functools.partial(dict, asked), lambda: torch.empty(0, dtype=torch.long))
        for name, asked in zip(names, _ASKED, strict=True)
    ]

    def batch(current: Any, requests: Any, logits: Tensor, probs: Any, meta: Any) -> Batch:
        return Batch(token_ids=drafts.long(), scores=logits, logits=logits, possible=possible)

    fake: Any = SimpleNamespace(rules=hooks.rules, requests=lambda counts: requests, batch=batch)
    meta = SimpleNamespace(all_greedy=True, all_random=False, temperature=None, generators={}, top_k=None, top_p=None)
    token = ROUND.set(V1Round(fake, state=None))
    try:
        output = rejection_sampler.rejection_sample(
            drafts, [1, 1], 1, ends, None, _logits(2, size, device), bonus, meta
        )
    finally:
        ROUND.reset(token)
    return int(output[0, 0]), int(output[1, 0])


def _v2(hooks: Any, size: int) -> list[tuple[int, int]]:
    """Greedy and sampled, one request after the other: a server may have a single slot."""
    try:
        return [
            (_v2_token(hooks, size, _ASKED[0], temperature), _v2_token(hooks, size, _ASKED[1], temperature))
            for temperature in (0.0, 0.7)
        ]
    finally:
        hooks.processor.round = hooks.processor.chunk = None
        hooks.processor.forget_slots()


def _v2_token(hooks: Any, size: int, asked: dict[str, str], temperature: float) -> int:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    from reprieve.vllm_plugin.v2.round import V2Round

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
        _logits(2, size, device), row_slots, slots, hosts, positions, fed, places, np.array([7])
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
