"""One worker's rule at work: requests to rows, a round's tensors to decisions, and what came of them to counts.

Knows vLLM's tensors and request ids, none of its classes: those are `vllm_0_32`'s.
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
from reprieve.rules import RiskBudget, Rule
from reprieve.serving.policy import STRICT, Policy
from reprieve.serving.vllm_plugin.batch import Batch, Decisions, Row, decide
from reprieve.transfers import to_device

logger = logging.getLogger("vllm.reprieve")


@dataclass(frozen=True)
class RequestRules:
    """A request's own setting of the rule, and what is left of its budget."""

    rule: Rule
    budget: RiskBudget


@dataclass(frozen=True)
class RoundRequest:
    """A request as the engine's batch knows it."""

    request_id: str
    num_drafted: int
    greedy: bool
    asked: Callable[[], Mapping[str, Any] | None]  # its extra arguments
    context_ids: Callable[[], Tensor]


@dataclass
class Counts:
    """What one round or several did for one request."""

    rule: str
    num_rescued: int = 0
    num_rounds: int = 0


@dataclass
class _Pending:
    """Counts that are on their way from the device."""

    request_ids: list[str]
    rules: list[str]
    rescued: Tensor  # [B], on the CPU once `ready` is
    ready: Any


@dataclass
class WorkerRules:
    """The state of the plugin in one worker.

    Args:
        policy: the operator's, its rule bound to the tokenizer and on the worker's device.
        rank: of the worker.
        seed: of the noise that random rules draw; the same on every rank.
    """

    policy: Policy
    rank: int = 0
    seed: int = 0
    failures: int = 0
    num_rounds: int = 0
    num_rescued: int = 0
    _known: dict[str, RequestRules] = field(default_factory=dict)
    _drafted: dict[str, bool] = field(default_factory=dict)
    _draft_probs: dict[str, Tensor] = field(default_factory=dict)
    _pending: list[_Pending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._noise = torch.Generator().manual_seed(self.seed)

    @property
    def status(self) -> dict[str, Any]:
        """For health checks: plain values that travel between processes."""
        return {
            "active": True,
            "rank": self.rank,
            "rule": self.policy.rule.spec,
            "failures": self.failures,
            "num_rounds": self.num_rounds,
            "num_rescued": self.num_rescued,
        }

    def note_drafts(self, request_ids: Sequence[str], probs: Tensor | None, *, real: bool = True) -> None:
        """Remember whose next drafts come from the drafter, and the distributions they came from [B, K, V]."""
        for place, request_id in enumerate(request_ids):
            self._drafted[request_id] = real
            if probs is None or not real:
                self._draft_probs.pop(request_id, None)
            else:
                self._draft_probs[request_id] = probs[place]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what belongs to requests that have ended; another may come by the same name."""
        for request_id in request_ids:
            for kept in (self._known, self._drafted, self._draft_probs):
                kept.pop(request_id, None)

    def forget_all_but(self, request_ids: Mapping[str, Any]) -> None:
        """Drop what belongs to none of these requests."""
        self.forget([known for known in {**self._known, **self._drafted} if known not in request_ids])

    def rows(self, requests: Sequence[RoundRequest]) -> list[Row]:
        """The batch's requests with their rules."""
        reads_draft = Need.DRAFT_PROBS in self.policy.rule.traits.needs
        rows = []
        for request in requests:
            known = self._rules_of(request)
            trusted = self._drafted.get(request.request_id, False)
            if reads_draft:
                trusted = trusted and request.request_id in self._draft_probs
            rows.append(
                Row(known.rule, request.num_drafted, request.greedy, trusted, known.budget, request.context_ids)
            )
        return rows

    def _rules_of(self, request: RoundRequest) -> RequestRules:
        known = self._known.get(request.request_id)
        if known is None:
            try:
                rule = self.policy.resolve(request.asked())
            except ReprieveError as error:  # the front end refuses such requests; a worker must not fall over one
                logger.error("request %s is served losslessly: %s", request.request_id, error)
                rule = STRICT
            known = self._known[request.request_id] = RequestRules(rule, RiskBudget.of(rule))
        return known

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
        """Draws for rules that are random themselves, [size]: the same on every rank."""
        if Need.NOISE not in self.policy.rule.traits.needs:
            return None
        return to_device(torch.rand(size, generator=self._noise), device)

    def decide(self, rows: Sequence[Row], make_batch: Callable[[], Batch]) -> Decisions | None:
        """Decisions for a round; None where nobody asked for leniency, or where the rule failed.

        A rule that raises is a defect; it is logged, counted, and makes the health check fail, and requests are served
        losslessly meanwhile.
        """
        if all(row.strict for row in rows):
            return None
        with self._guarded("the rule failed; its requests are served losslessly"):
            return decide(self.policy.rule, rows, make_batch())
        return None

    @contextmanager
    def _guarded(self, message: str) -> Iterator[None]:
        """A defect of ours must not end the engine: it is logged once, and counted."""
        try:
            yield
        except Exception:
            self.failures += 1
            if self.failures == 1:
                logger.exception(message)

    def count(self, requests: Sequence[RoundRequest], rows: Sequence[Row], made: Decisions, output_ids: Tensor) -> None:
        """Take note of a round's outcome: output token ids [B, K + 1], -1 where there is none."""
        with self._guarded("counting failed"):
            self._pending.append(self._counted(requests, rows, made, output_ids))

    def _counted(
        self, requests: Sequence[RoundRequest], rows: Sequence[Row], made: Decisions, output_ids: Tensor
    ) -> _Pending:
        num_accepted = (output_ids >= 0).sum(-1) - 1
        places = torch.arange(output_ids.shape[-1], device=output_ids.device)
        against = torch.zeros(output_ids.shape, dtype=torch.bool, device=output_ids.device)
        flat = [
            place * output_ids.shape[-1] + token for place, row in enumerate(rows) for token in range(row.num_drafted)
        ]
        positions = to_device(torch.tensor(flat, dtype=torch.long), output_ids.device)
        against.view(-1)[positions] = ~made.lossless
        rescued = (against & (places < num_accepted.unsqueeze(-1))).sum(-1)
        ready = None
        if rescued.device.type == "cuda":
            rescued = rescued.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        rules = ["" if row.strict else row.rule.spec for row in rows]
        return _Pending([request.request_id for request in requests], rules, rescued, ready)

    def take_counts(self) -> dict[str, Counts]:
        """Counts that have arrived since the last call, by request; on a GPU they come a round late."""
        counts: dict[str, Counts] = {}
        waiting = []
        for pending in self._pending:
            if pending.ready is not None and not pending.ready.query():
                waiting.append(pending)
                continue
            for request_id, rule, rescued in zip(
                pending.request_ids, pending.rules, pending.rescued.tolist(), strict=True
            ):
                if not rule:
                    continue
                self.num_rounds += 1
                self.num_rescued += rescued
                made = counts.setdefault(request_id, Counts(rule))
                made.num_rescued += rescued
                made.num_rounds += 1
        self._pending = waiting
        return counts
