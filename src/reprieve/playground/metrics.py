"""Metrics of the server in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from reprieve.playground.worker import Finished, QueuedRequest, Worker

if TYPE_CHECKING:
    from reprieve.certify.monitor import MonitorStatus

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/reprieve", "/health", "/metrics", "/")


class Metrics:
    """Counters of one server, in a separate registry, so that two servers in one process do not collide."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("reprieve_requests", "Responses.", ["path", "status"], registry=registry)
        self.ended = Counter("reprieve_unfinished", "Requests that ended early.", ["why"], registry=registry)
        self._tokens = Counter("reprieve_tokens", "Generated tokens.", ["rule", "provenance"], registry=registry)
        self._rounds = Counter("reprieve_rounds", "Rounds: target forwards.", ["rule"], registry=registry)
        self._drafted = Counter("reprieve_drafted_tokens", "Drafted tokens.", ["rule"], registry=registry)
        self._waiting = Gauge("reprieve_waiting_requests", "Requests in the queue.", registry=registry)
        self._running = Gauge("reprieve_running_requests", "Requests being answered.", registry=registry)
        self.first_token = Histogram(
            "reprieve_first_token_seconds", "To the first token, waiting included.", buckets=_SECONDS, registry=registry
        )
        self.duration = Histogram(
            "reprieve_request_seconds", "To the last token, waiting included.", buckets=_SECONDS, registry=registry
        )
        self._quality: Callable[[], MonitorStatus] | None = None
        self._drop = Gauge(
            "reprieve_answers_changed",
            "Share of checked answers that differ from lossless ones.",
            ["bound"],
            registry=registry,
        )
        self._checked = Gauge("reprieve_quality_checked", "Requests answered losslessly too.", registry=registry)
        self._alarm = Gauge(
            "reprieve_quality_alarm",
            "1 once a larger share of changed answers than allowed is proved.",
            registry=registry,
        )

    def watch_quality(self, status: Callable[[], MonitorStatus]) -> None:
        """Export the status of a quality monitor."""
        self._quality = status

    def count_request(self, path: str, status: int) -> None:
        """Count one response; unknown paths share a label, so that clients cannot create labels."""
        known = path if path in _PATHS else "other"
        self._requests.labels(known, str(status)).inc()

    def count_answer(self, job: QueuedRequest, finished: Finished) -> None:
        """One finished choice."""
        rule = "lossless" if job.choice.strict else job.choice.name
        for token in finished.generation.tokens:
            self._tokens.labels(rule, token.provenance.value).inc()
        self._rounds.labels(rule).inc(finished.generation.num_rounds)
        self._drafted.labels(rule).inc(finished.generation.num_drafted)

    def page(self, worker: Worker) -> bytes:
        """The content of /metrics."""
        self._waiting.set(worker.num_waiting)
        self._running.set(worker.busy)
        if self._quality is not None:
            status = self._quality()
            self._drop.labels("mean").set(status.drop)
            self._drop.labels("low").set(status.interval[0])
            self._drop.labels("high").set(status.interval[1])
            self._checked.set(status.num_checked)
            self._alarm.set(status.alarm)
        return generate_latest(self._registry)
