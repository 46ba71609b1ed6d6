"""Self-test in a worker at startup: a token that the rule accepts is emitted; a request with the rule off is unchanged.

Two synthetic requests with one drafted token each go through the installed hooks and vLLM's own sampler. The rule
accepts every token; the target prefers another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reprieve.errors import ReprieveError, SpecError
from reprieve.needs import Need
from reprieve.policies.menu import Menu
from reprieve.policies.policy import SWITCH, Policy
from reprieve.rules import parse_rule
from reprieve.vllm_plugin.rounds import WorkerRules

OWN, DRAFTED = 1, 2  # the target's token, and the drafter's
ASKED: tuple[dict[str, str], ...] = ({}, {SWITCH: "off"})


def run_selftest(hooks: Any) -> None:
    """Run the self-test on a runner's hooks.

    Raises:
        ReprieveError: the hooks do not work with this vLLM.
    """
    rules, size = hooks.rules, int(hooks.runner.model_config.get_vocab_size())
    hooks.rules = WorkerRules(Menu([Policy(parse_rule(f"top_k:k={size}"))]), rank=rules.rank)
    try:
        for relaxed, untouched in hooks.try_out(size):
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
    """Refuse heads if the model returns hidden states from before its final norm: heads were trained on normed states.

    Some models in vLLM (MiMo) apply the final norm in `compute_logits`. Doubling a state then leaves the logits
    unchanged.

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


def certain_logits(num_rows: int, size: int, device: torch.device) -> Tensor:
    logits = torch.zeros(num_rows, size, device=device)
    logits[:, OWN] = 30.0  # certain, sampled or not
    return logits
