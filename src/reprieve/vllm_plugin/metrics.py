"""Counts of drafted, matched and rescued tokens, reported with vLLM's own statistics on both model runners.

A worker attaches counts to its output. The scheduler adds them to vLLM's per-step and per-request records, which carry
them to the front end. There they become Prometheus counters and part of the per-request metrics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from reprieve.backends.servers import INFO
from reprieve.vllm_plugin.rounds import WorkerRules

# On a ModelRunnerOutput: fields for the responses, and counts, by request; see `RoundCounter.take`.
ATTRIBUTE = "reprieve_counts"
FIELD = "reprieve"  # on vLLM's two records
# Fields of a response if no rule was in force for the request.
LOSSLESS = {
    "num_rescued_tokens": 0,
    "reprieve_rule": "lossless",
    "reprieve_threshold": None,
    "reprieve_certified": None,
}
_RESCUED = "vllm:reprieve_rescued_tokens"
_ROUNDS = "vllm:reprieve_relaxed_rounds"
_PLACES = "vllm:reprieve_tokens_per_position"
_COUNTERS = {
    _RESCUED: ("Drafted tokens accepted although the lossless check rejects them.", ["rule"]),
    _ROUNDS: ("Rounds verified by a relaxed rule, counted for each request.", ["rule"]),
    _PLACES: ("Drafted tokens of rounds verified by a relaxed rule, by outcome.", ["rule", "outcome", "position"]),
}


def attach(output: Any, rules: WorkerRules) -> None:
    """Send a worker's counts along with its output, to the scheduler, and which requests were decoded leniently."""
    with rules.guarded("counting failed"):
        if taken := rules.counter.take():
            setattr(output, ATTRIBUTE, taken)


def extend(about: Mapping[str, str] | None = None) -> None:
    """Add fields to vLLM's records and wrap the functions that fill and read them, once per process.

    Args:
        about: labels of the metric `vllm:reprieve_info`, which describe the server.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    if hasattr(SpecDecodingStats, FIELD):
        return
    _add_field(SpecDecodingStats, "list", list)
    _add_field(RequestSpecDecodeMetrics, "dict", dict)
    _fill(Scheduler)
    _export(SpecDecodingProm, dict(about or {}))
    _summarise(RequestSpecDecodeMetrics)


def _add_field(kind: type, annotation: str, make: Callable[[], Any]) -> None:
    """Add a field to a dataclass in place, because other modules refer to the class itself."""
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:  # processing a class takes these off it
            setattr(kind, field.name, dataclasses.field(default_factory=field.default_factory))
    kind.__annotations__[FIELD] = annotation
    setattr(kind, FIELD, dataclasses.field(default_factory=make))
    for method in ("__init__", "__repr__", "__eq__"):  # `dataclass` does not overwrite existing methods
        if method in vars(kind):
            delattr(kind, method)
    dataclasses.dataclass(kind)
    setattr(kind, FIELD, None)  # removed by `dataclass`; set again to mark the class as extended


def _fill(scheduler: Any) -> None:
    update = scheduler.update_from_output

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        attached = getattr(model_runner_output, ATTRIBUTE, {})
        for request_id, (mark, counts) in attached.items():
            request = self.requests.get(request_id)
            if request is not None and request.spec_decode_metrics is not None:
                _add(request.spec_decode_metrics, mark, counts)
        outputs_by_client = update(self, scheduler_output, model_runner_output)
        # A step without drafts has no statistics that could carry the counts: keep them for a later step.
        left = [*getattr(self, "_reprieve_counts", ()), *(one for _, counts in attached.values() for one in counts)]
        for outputs in outputs_by_client.values() if left else ():
            stats = outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats
            if stats is not None:
                stats.reprieve.extend(left)
                left = []
        self._reprieve_counts = left if self.log_stats else []
        return outputs_by_client

    scheduler.update_from_output = update_from_output


def _add(metrics: Any, mark: Mapping[str, Any] | None, counts: list[tuple[Any, ...]]) -> None:
    """Note on a request's metrics that it was decoded leniently, and how many tokens were rescued."""
    extra = metrics.reprieve
    extra |= mark or {}
    extra["num_rescued_tokens"] = extra.get("num_rescued_tokens", 0) + sum(sum(rescued) for *_, rescued in counts)


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
            self.reprieve_counters = {
                name: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, *more])
                for name, (text, more) in _COUNTERS.items()
            }
            if about:
                # All processes write the same labels, so the most recent write is enough.
                info = Gauge(INFO, "Server configuration.", labelnames=list(about), multiprocess_mode="mostrecent")
                info.labels(**about).set(1)

    @functools.wraps(observe)
    def note(self: Any, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
        observe(self, spec_decoding_stats, engine_idx)
        if not self.spec_decoding_enabled:
            return
        totals: Counter[tuple[str, ...]] = Counter()  # over the step: a counter's `labels` costs more than an addition
        for rule, num_drafted, rescued in spec_decoding_stats.reprieve:
            totals[_ROUNDS, rule] += 1
            totals[_RESCUED, rule] += sum(rescued)
            for position in range(num_drafted):
                totals[_PLACES, rule, "drafted", str(position)] += 1
            for position, flag in enumerate(rescued):
                totals[_PLACES, rule, "rescued" if flag else "matched", str(position)] += 1
        engine = self.reprieve_engines[engine_idx]
        for (name, *labels), total in totals.items():
            self.reprieve_counters[name].labels(*engine, *labels).inc(total)

    prom.__init__, prom.observe = begin, note


def _summarise(metrics: Any) -> None:
    to_dict = metrics.to_dict

    @functools.wraps(to_dict)
    def with_ours(self: Any) -> dict[str, Any]:
        return {**to_dict(self), **LOSSLESS, **self.reprieve}

    metrics.to_dict = with_ours
