"""Rules in one worker: turn requests into rows, a round's tensors into decisions, and its outcome into counts.

Uses vLLM's tensors and request ids but none of its classes: those are left to `v1`, `v2` and `v2_processor`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reprieve.errors import ReprieveError
from reprieve.policies.menu import STRUCTURED_OUTPUTS, Choice, Menu
from reprieve.policies.policy import STRICT
from reprieve.rules import RiskBudget, Rule
from reprieve.rules.batch import Batch, BatchRequest, Decisions, cells_of, decide
from reprieve.transfers import to_device
from reprieve.types import Need

logger = logging.getLogger("vllm.reprieve")
_WARM_UP = ("_warmup_", "_v2_mixed_warmup")  # ids of V2's own requests at start, whose rounds do not count


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
class _Pending:
    """Counts that are on their way from the device."""

    request_ids: list[str]
    rules: list[str]  # labels of the counters; empty if the lossless check was in force
    num_drafted: list[int]
    kept: Tensor  # [B, K + 2], int16, on the CPU after `ready`: number accepted, then 1 where lossless refuses
    ready: Any


@dataclass
class RoundCounter:
    """Counts of one worker, until they are attached to its output.

    Args:
        menu: the operator's rules.
    """

    menu: Menu
    num_rounds: int = 0
    num_rescued: int = 0
    # The most lenient rule that was in force for a request: its label and leniency.
    _lenient: dict[str, tuple[str, float]] = field(default_factory=dict)
    # Bounded, because ranks that return no output never take their counts. One thread appends, another one takes.
    _pending: deque[_Pending] = field(default_factory=lambda: deque(maxlen=256))
    _marks: deque[tuple[str, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=4096))

    def forget(self, request_id: str) -> None:
        """Drop the state of a finished request."""
        self._lenient.pop(request_id, None)

    def mark(self, request_id: str, name: str, rule: Rule) -> str:
        """Mark a request's response with the rule that was in force; return the rule's label."""
        label = self.label(name, rule)
        before = self._lenient.get(request_id)
        if before is None or (before[0] != label and rule.leniency > before[1]):
            self._lenient[request_id] = (label, rule.leniency)
            certified = self.menu.policies[name].covers(rule)
            metadata = {"reprieve_rule": label, "reprieve_threshold": rule.dial_value, "reprieve_certified": certified}
            self._marks.append((request_id, metadata))
        return label

    def label(self, name: str, rule: Rule) -> str:
        """Return a rule's label for counters: its name and, if the operator set it, the value of its dial."""
        value = rule.dial_value
        if value is None:
            return name
        return f"{name}@{value:g}" if value in self.menu.policies[name].named_values else f"{name}@asked"

    def start_copy(
        self,
        request_ids: list[str],
        labels: list[str],
        num_drafted: list[int],
        num_accepted: Tensor,  # [B]
        against: Tensor,  # [B, K + 1], bool: drafted tokens that the lossless check refuses
    ) -> None:
        """Start copying a round's counts to the host."""
        kept = torch.cat([num_accepted.unsqueeze(-1), against], -1).to(torch.int16)
        ready = None
        if kept.device.type == "cuda":
            kept = kept.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._pending.append(_Pending(request_ids, labels, num_drafted, kept, ready))

    def take(self) -> dict[str, tuple[dict[str, Any] | None, list[tuple[str, int, list[int]]]]]:
        """Return, by request, its mark and its rounds under a rule that have arrived since the last call.

        A round is its label for the counters, the number of drafted tokens, and for each accepted one 1 if it was
        rescued and 0 if the lossless check accepts it.
        """
        taken: dict[str, tuple[dict[str, Any] | None, list[tuple[str, int, list[int]]]]] = {}
        while self._marks:
            request_id, mark = self._marks.popleft()
            taken[request_id] = (mark, [])
        while self._pending:
            pending = self._pending.popleft()
            if pending.ready is not None and not pending.ready.query():
                self._pending.appendleft(pending)
                break
            for request_id, rule, num_drafted, (num_accepted, *rescued) in zip(
                pending.request_ids, pending.rules, pending.num_drafted, pending.kept.tolist(), strict=True
            ):
                if rule and num_drafted:
                    kept = rescued[:num_accepted]
                    taken.setdefault(request_id, (None, []))[1].append((rule, num_drafted, kept))
                    self.num_rounds += 1
                    self.num_rescued += sum(kept)
        return taken


@dataclass
class WorkerRules:
    """The state of the plugin in one worker.

    Args:
        menu: the operator's rules, bound to the tokenizer and on the worker's device.
        rank: of the worker.
    """

    menu: Menu
    rank: int = 0
    failures: int = 0
    counter: RoundCounter = field(init=False)
    _known: dict[str, RequestRules] = field(default_factory=dict)
    _drafts: dict[str, Tensor | None] = field(default_factory=dict)  # of requests whose next drafts are the drafter's

    def __post_init__(self) -> None:
        self.counter = RoundCounter(self.menu)
        self._noise = torch.Generator().manual_seed(0)  # the same on every rank

    @property
    def status(self) -> dict[str, Any]:
        """Plain values for health checks."""
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
            self._drafts.pop(request_id, None)
            if real:
                self._drafts[request_id] = None if probs is None else probs[index]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of finished requests; a later request may reuse an id."""
        for request_id in request_ids:
            self.counter.forget(request_id)
            self._known.pop(request_id, None)
            self._drafts.pop(request_id, None)

    def forget_all_but(self, request_ids: Mapping[str, Any]) -> None:
        """Drop the state of all requests except these."""
        self.forget([known for known in {**self._known, **self._drafts} if known not in request_ids])

    def batch_requests(self, requests: Sequence[RoundRequest]) -> list[BatchRequest]:
        """The batch's requests with their rules."""
        rows = []
        for request in requests:
            known = self._known.get(request.request_id) or self.admit(request.request_id, request.settings)
            row = self.in_force(known, request.num_drafted, len(requests), greedy=request.greedy)
            trusted = request.request_id in self._drafts
            if Need.DRAFT_PROBS in row.rule.traits.needs:
                trusted = self._drafts.get(request.request_id) is not None
            rows.append(row if trusted else dataclasses.replace(row, trusted=False))  # copied only where it differs
        return rows

    def in_force(self, known: RequestRules, num_drafted: int, num_running: int, *, greedy: bool) -> BatchRequest:
        """Return a request with the rule of this round; its drafts are taken to be the drafter's."""
        choice = known.choice
        rule = self.menu.policies[choice.name].at_load(num_running) if choice.follows_load else choice.rule
        known.budget.follow(rule)
        return BatchRequest(choice.name, rule, num_drafted, greedy, True, known.budget)

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

    def flat_draft_probs(self, requests: Sequence[RoundRequest], like: Tensor) -> Tensor:
        """The drafted tokens' distributions one after another, [N, V]; uniform where there is none."""
        parts = []
        for request in requests:
            if request.num_drafted:
                probs = self._drafts.get(request.request_id)
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
        with self.guarded():
            return decide(rows, make_batch())
        return None

    @contextmanager
    def guarded(self, message: str = "the rule failed; its requests are served losslessly") -> Iterator[None]:
        """Keep exceptions of the plugin from ending the engine: count them all and log the first."""
        try:
            yield
        except Exception:
            self.failures += 1
            if self.failures == 1:
                logger.exception(message)

    def count(
        self, request_ids: list[str], rows: list[BatchRequest], sizes: list[int], lossless: Tensor, num_accepted: Tensor
    ) -> None:
        """Take note of a round's outcome.

        Args:
            sizes: [B], whose sum is N: tokens of each block, padding included.
            lossless: [N], bool: tokens that the lossless check alone would accept.
            num_accepted: [B], drafted tokens.
        """
        with self.guarded("counting failed"):
            against = lossless.new_zeros(len(rows), max(sizes))
            against[cells_of(sizes, lossless.device)] = ~lossless
            labels = [
                "" if row.strict or name.startswith(_WARM_UP) else self.counter.mark(name, row.name, row.rule)
                for name, row in zip(request_ids, rows, strict=True)
            ]
            self.counter.start_copy(request_ids, labels, [row.num_drafted for row in rows], num_accepted, against)
