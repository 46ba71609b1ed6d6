"""Rules in one worker: turn requests into rows, and a round's tensors into decisions.

Uses vLLM's tensors and request ids but none of its classes: those are left to `v1.runner` and `v2.runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reprieve.errors import ReprieveError
from reprieve.needs import Need
from reprieve.policies.menu import STRUCTURED_OUTPUTS, Choice, Menu
from reprieve.policies.policy import STRICT
from reprieve.rules import RiskBudget, Rule
from reprieve.rules.batch import Batch, BatchRequest, Decisions, decide
from reprieve.transfers import device_tensor, to_device
from reprieve.vllm_plugin.counting import RoundCounter

logger = logging.getLogger("vllm.reprieve")


def request_settings(sampling_params: Any) -> dict[str, Any]:
    """Return a request's settings for rules: its extra arguments, and whether its output is structured."""
    structured = getattr(sampling_params, "structured_outputs", None) is not None
    return {**(sampling_params.extra_args or {}), STRUCTURED_OUTPUTS: structured}


@dataclass(frozen=True)
class RequestRules:
    """Choice of one request, and its remaining risk budget."""

    choice: Choice
    budget: RiskBudget

    @property
    def strict(self) -> bool:
        """True if no rule will ever apply to the request."""
        return self.choice.strict and not self.choice.follows_load


@dataclass(frozen=True)
class RoundRequest:
    """A request as the engine's batch knows it."""

    request_id: str
    num_drafted: int
    greedy: bool
    settings: Callable[[], Mapping[str, Any] | None]  # see `request_settings`


@dataclass
class WorkerRules:
    """The state of the plugin in one worker.

    Args:
        menu: the operator's rules, bound to the tokenizer and on the worker's device.
        rank: of the worker.
        seed: of the noise that random rules draw; the same on every rank.
    """

    menu: Menu
    rank: int = 0
    seed: int = 0
    failures: int = 0
    counter: RoundCounter = field(init=False)
    _known: dict[str, RequestRules] = field(default_factory=dict)
    _drafted: dict[str, bool] = field(default_factory=dict)
    _draft_probs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counter = RoundCounter(self.menu)
        self._noise = torch.Generator().manual_seed(self.seed)

    @property
    def status(self) -> dict[str, Any]:
        """For health checks: plain values that travel between processes."""
        return {
            "active": True,
            "rank": self.rank,
            "rule": "; ".join(rule.spec for rule in self.menu.rules),
            "failures": self.failures,
            "num_rounds": self.counter.num_rounds,
            "num_rescued": self.counter.num_rescued,
        }

    def note_drafts(self, request_ids: Sequence[str], probs: Tensor | None, *, real: bool = True) -> None:
        """Remember whose next drafts come from the drafter, and the distributions they came from [B, K, V]."""
        for index, request_id in enumerate(request_ids):
            self._drafted[request_id] = real
            if probs is None or not real:
                self._draft_probs.pop(request_id, None)
            else:
                self._draft_probs[request_id] = probs[index]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of finished requests; a later request may reuse an id."""
        for request_id in request_ids:
            self.counter.forget(request_id)
            for kept in (self._known, self._drafted, self._draft_probs):
                kept.pop(request_id, None)

    def forget_all_but(self, request_ids: Mapping[str, Any]) -> None:
        """Drop the state of all requests except these."""
        self.forget([known for known in {**self._known, **self._drafted} if known not in request_ids])

    def batch_requests(self, requests: Sequence[RoundRequest]) -> list[BatchRequest]:
        """The batch's requests with their rules."""
        rows = []
        for request in requests:
            known = self.request_rules(request.request_id, request.settings)
            rule = self.rule_of(known.choice, len(requests))
            known.budget.follow(rule)
            trusted = self._drafted.get(request.request_id, False)
            if Need.DRAFT_PROBS in rule.traits.needs:
                trusted = trusted and request.request_id in self._draft_probs
            rows.append(
                BatchRequest(known.choice.name, rule, request.num_drafted, request.greedy, trusted, known.budget)
            )
        return rows

    def request_rules(self, request_id: str, settings: Callable[[], Mapping[str, Any] | None]) -> RequestRules:
        """Return a request's choice, resolved at its first round."""
        known = self._known.get(request_id)
        return self.admit(request_id, settings) if known is None else known

    def admit(self, request_id: str, settings: Callable[[], Mapping[str, Any] | None]) -> RequestRules:
        """Register a request that enters or re-enters the batch; it keeps its budget if its choice is unchanged."""
        try:
            choice = self.menu.choose(settings())
        except ReprieveError as error:  # the front end refuses such requests; a worker must not crash on one
            logger.error("request %s is served losslessly: %s", request_id, error)
            choice = Choice("", STRICT)
        before = self._known.get(request_id)
        if before is None or before.choice != choice:
            self._known[request_id] = RequestRules(choice, RiskBudget.of(choice.rule))
        return self._known[request_id]

    def rule_of(self, choice: Choice, num_running: int) -> Rule:
        """The rule in force for a request in this round."""
        return self.menu.policies[choice.name].at_load(num_running) if choice.follows_load else choice.rule

    def flat_draft_probs(self, requests: Sequence[RoundRequest], like: Tensor) -> Tensor:
        """The drafted tokens' distributions one after another, [N, V]; uniform where there is none."""
        parts = []
        for request in requests:
            if request.num_drafted:
                probs = self._draft_probs.get(request.request_id)
                if probs is None:
                    probs = torch.full_like(like[: request.num_drafted], 1 / like.shape[-1])
                parts.append(probs[: request.num_drafted])
        return torch.cat(parts)

    def noise(self, size: int, device: torch.device) -> Tensor | None:
        """Return the draws for randomized rules, [size], the same on every rank; None if no rule needs them."""
        if Need.NOISE not in self.menu.needs:
            return None
        return to_device(torch.rand(size, generator=self._noise), device)

    def decide(self, rows: Sequence[BatchRequest], make_batch: Callable[[], Batch]) -> Decisions | None:
        """Return the decisions for a round; None if no request uses a rule, or if the rule failed.

        A rule that raises is a bug: it is logged and counted, the health check fails, and the requests are served
        losslessly.
        """
        if all(row.strict for row in rows):
            return None
        with self.guarded("the rule failed; its requests are served losslessly"):
            return decide(rows, make_batch())
        return None

    @contextmanager
    def guarded(self, message: str) -> Iterator[None]:
        """Keep exceptions of the plugin from ending the engine: count them all and log the first."""
        try:
            yield
        except Exception:
            self.failures += 1
            if self.failures == 1:
                logger.exception(message)

    def count(
        self, requests: Sequence[RoundRequest], rows: Sequence[BatchRequest], decisions: Decisions, output_ids: Tensor
    ) -> None:
        """Take note of a round's outcome: output token ids [B, K + 1], -1 where there is none."""
        with self.guarded("counting failed"):
            flat = [
                index * output_ids.shape[-1] + token
                for index, row in enumerate(rows)
                for token in range(row.num_drafted)
            ]
            lossless = torch.ones(output_ids.shape, dtype=torch.bool, device=output_ids.device)
            lossless.view(-1)[device_tensor(flat, torch.long, output_ids.device)] = decisions.lossless
            self.counter.start_copy(
                [request.request_id for request in requests],
                [
                    "" if row.strict else self.counter.mark(request.request_id, row.name, row.rule)
                    for request, row in zip(requests, rows, strict=True)
                ],
                [row.num_drafted for row in rows],
                (output_ids >= 0).sum(-1) - 1,
                ~lossless,
            )
