"""Counts of rounds under a rule, and marks for the responses of lenient requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reprieve.policies.menu import Menu
from reprieve.rules import Rule


class RelaxedRound(NamedTuple):
    """Outcome of one request's round under a rule."""

    request_id: str
    rule: str  # label of the counters
    num_drafted: int
    rescued: list[int]  # for each accepted token, 1 if it was rescued and 0 if the lossless check accepts it


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
    """Counts of one worker, until its output takes them along.

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

    def take_marks(self) -> dict[str, dict[str, Any]]:
        """Return the marks for requests since the last call, by request, and clear them."""
        marks = {}
        while self._marks:
            request_id, metadata = self._marks.popleft()
            marks[request_id] = metadata
        return marks

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

    def take_rounds(self) -> list[RelaxedRound]:
        """Return the rounds under a rule whose counts have arrived since the last call."""
        rounds = []
        while self._pending:
            pending = self._pending.popleft()
            if pending.ready is not None and not pending.ready.query():
                self._pending.appendleft(pending)
                break
            for request_id, rule, num_drafted, (num_accepted, *rescued) in zip(
                pending.request_ids, pending.rules, pending.num_drafted, pending.kept.tolist(), strict=True
            ):
                if rule and num_drafted:
                    rounds.append(RelaxedRound(request_id, rule, num_drafted, rescued[:num_accepted]))
                    self.num_rounds += 1
                    self.num_rescued += sum(rescued[:num_accepted])
        return rounds
