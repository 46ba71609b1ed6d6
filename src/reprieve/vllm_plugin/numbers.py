"""Numbers: what rules drafted, matched and rescued travels with vLLM's own statistics, on both model runners.

A worker attaches counts to its output; the scheduler adds them to vLLM's per-step and per-request records, which take
them to the front end; there they become Prometheus counters and part of the per-request metrics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from reprieve.backends.running import INFO
from reprieve.vllm_plugin.rounds import WorkerRules

ATTRIBUTE = "reprieve_counts"  # on a ModelRunnerOutput: {request id: [(rule, rounds, drafted, matched, rescued)]}
_RESCUED = "vllm:reprieve_rescued_tokens"
_ROUNDS = "vllm:reprieve_relaxed_rounds"
_PLACES = "vllm:reprieve_tokens_per_position"
_COUNTERS = {
    _RESCUED: ("Drafted tokens accepted although the lossless check rejects them.", ["rule"]),
    _ROUNDS: ("Verified requests (a request, a round) judged by a relaxed rule.", ["rule"]),
    _PLACES: ("Drafted tokens of such rounds, by what became of them.", ["rule", "outcome", "position"]),
}


def attach(output: Any, rules: WorkerRules) -> None:
    """Send a worker's counts along with its output, to the scheduler."""
    with rules.guarded("counting failed"):
        by_request: dict[str, list[tuple[Any, ...]]] = {}
        for (request_id, rule), made in rules.take_counts().items():
            numbers = (rule, made.num_rounds, made.drafted, made.matched, made.rescued)
            by_request.setdefault(request_id, []).append(numbers)
        if by_request:
            setattr(output, ATTRIBUTE, by_request)


def extend(about: Mapping[str, str] | None = None) -> None:
    """Widen vLLM's records and wrap what fills and reads them, once a process.

    Args:
        about: what the server is, for the metrics page: the labels of `vllm:reprieve_info`.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    if hasattr(SpecDecodingProm, "reprieve"):
        return
    SpecDecodingProm.reprieve = None
    _add_field(SpecDecodingStats, "reprieve", "list", dataclasses.field(default_factory=list))
    _add_field(RequestSpecDecodeMetrics, "num_rescued_tokens", "int", 0)
    _add_field(RequestSpecDecodeMetrics, "reprieve_rule", "str", "")
    _fill(Scheduler)
    _export(SpecDecodingProm, dict(about or {}))
    _summarise(RequestSpecDecodeMetrics)


def _add_field(kind: type, name: str, annotation: str, default: Any) -> None:
    """Give a dataclass one more field, in place: its records are found by class in other modules."""
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:  # processing a class takes these off it
            setattr(kind, field.name, dataclasses.field(default_factory=field.default_factory))
    kind.__annotations__[name] = annotation
    setattr(kind, name, default)
    for made in ("__init__", "__repr__", "__eq__"):  # else the old ones stay
        if made in vars(kind):
            delattr(kind, made)
    dataclasses.dataclass(kind)


def _fill(scheduler: Any) -> None:
    update, make = scheduler.update_from_output, scheduler.make_spec_decoding_stats

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        # What nothing was drafted for in this step is claimed in a later one, while the request lives.
        left = {key: counts for key, counts in getattr(self, "_reprieve_counts", {}).items() if key in self.requests}
        for key, counts in getattr(model_runner_output, ATTRIBUTE, {}).items():
            left.setdefault(key, []).extend(counts)
        self._reprieve_counts = left
        return update(self, scheduler_output, model_runner_output)

    @functools.wraps(make)
    def make_spec_decoding_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = make(self, *args, **kwargs)
        request_id = kwargs.get("request_id", args[-1] if args else None)
        counts = self._reprieve_counts.pop(request_id, [])
        if stats is not None:
            stats.reprieve.extend(counts)
        request = self.requests.get(request_id)
        if request is not None and request.spec_decode_metrics is not None:
            for rule, _, _, _, rescued in counts:
                request.spec_decode_metrics.num_rescued_tokens += sum(rescued)
                request.spec_decode_metrics.reprieve_rule = rule
        return stats

    scheduler.update_from_output, scheduler.make_spec_decoding_stats = update_from_output, make_spec_decoding_stats


def _export(prom: Any, about: Mapping[str, str]) -> None:
    from prometheus_client import Gauge

    start, observe = prom.__init__, prom.observe

    @functools.wraps(start)
    def begin(
        self: Any, speculative_config: Any, labelnames: list[str], values: Any, *args: Any, **kwargs: Any
    ) -> None:
        start(self, speculative_config, labelnames, values, *args, **kwargs)
        if self.spec_decoding_enabled:
            self.reprieve_engines = dict(values)
            self.reprieve = {
                name: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, *more])
                for name, (text, more) in _COUNTERS.items()
            }
            if about:
                # The last process to write it stands for all: they say the same.
                info = Gauge(INFO, "What this server is.", labelnames=list(about), multiprocess_mode="mostrecent")
                info.labels(**about).set(1)

    @functools.wraps(observe)
    def note(self: Any, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
        observe(self, spec_decoding_stats, engine_idx)
        if not self.spec_decoding_enabled:
            return
        engine = self.reprieve_engines[engine_idx]
        for rule, num_rounds, *outcomes in spec_decoding_stats.reprieve:
            self.reprieve[_ROUNDS].labels(*engine, rule).inc(num_rounds)
            self.reprieve[_RESCUED].labels(*engine, rule).inc(sum(outcomes[-1]))
            for outcome, counts in zip(("drafted", "matched", "rescued"), outcomes, strict=True):
                for position, count in enumerate(counts):
                    if count:
                        self.reprieve[_PLACES].labels(*engine, rule, outcome, str(position)).inc(count)

    prom.__init__, prom.observe = begin, note


def _summarise(metrics: Any) -> None:
    to_dict = metrics.to_dict

    @functools.wraps(to_dict)
    def with_ours(self: Any) -> dict[str, Any]:
        return {
            **to_dict(self),
            "num_rescued_tokens": self.num_rescued_tokens,
            "reprieve_rule": self.reprieve_rule or "lossless",
        }

    metrics.to_dict = with_ours
