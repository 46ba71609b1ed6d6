"""Numbers: rescued tokens and relaxed rounds travel with vLLM 0.32's own statistics.

A worker attaches counts to its output; the scheduler adds them to vLLM's per-step and per-request records, which take
them to the front end; there they become Prometheus counters and part of the per-request metrics.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

ATTRIBUTE = "reprieve_counts"  # on a ModelRunnerOutput: {request id: (rule, rescued tokens, rounds)}
_RESCUED = "vllm:reprieve_rescued_tokens"
_ROUNDS = "vllm:reprieve_relaxed_rounds"


def extend(rule: str) -> None:
    """Widen vLLM's records and wrap what fills and reads them, once a process.

    Args:
        rule: the operator's, a label of the counters.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    SpecDecodingProm.reprieve_rule = rule
    if hasattr(SpecDecodingStats, "num_rescued_tokens"):
        return
    _add_field(SpecDecodingStats, "num_rescued_tokens", "int", 0)
    _add_field(SpecDecodingStats, "num_relaxed_rounds", "int", 0)
    _add_field(RequestSpecDecodeMetrics, "num_rescued_tokens", "int", 0)
    _add_field(RequestSpecDecodeMetrics, "reprieve_rule", "str", "")
    _fill(Scheduler)
    _export(SpecDecodingProm)
    _summarise(RequestSpecDecodeMetrics)


def _add_field(kind: type, name: str, annotation: str, default: Any) -> None:
    """Give a dataclass one more field, in place: its records are found by class in other modules."""
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:  # processing a class takes these off it
            setattr(kind, field.name, dataclasses.field(default_factory=field.default_factory))
    kind.__annotations__[name] = annotation
    setattr(kind, name, default)
    dataclasses.dataclass(kind)


def _fill(scheduler: Any) -> None:
    update, make = scheduler.update_from_output, scheduler.make_spec_decoding_stats

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._reprieve_counts = getattr(model_runner_output, ATTRIBUTE, {})
        return update(self, scheduler_output, model_runner_output)

    @functools.wraps(make)
    def make_spec_decoding_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = make(self, *args, **kwargs)
        request_id = kwargs.get("request_id", args[-1] if args else None)
        rule, num_rescued, num_rounds = self._reprieve_counts.pop(request_id, ("", 0, 0))
        if rule and stats is not None:
            stats.num_rescued_tokens += num_rescued
            stats.num_relaxed_rounds += num_rounds
        request = self.requests.get(request_id)
        if rule and request is not None and request.spec_decode_metrics is not None:
            request.spec_decode_metrics.num_rescued_tokens += num_rescued
            request.spec_decode_metrics.reprieve_rule = rule
        return stats

    scheduler.update_from_output, scheduler.make_spec_decoding_stats = update_from_output, make_spec_decoding_stats


def _export(prom: Any) -> None:
    start, observe = prom.__init__, prom.observe

    @functools.wraps(start)
    def begin(
        self: Any, speculative_config: Any, labelnames: list[str], values: Any, *args: Any, **kwargs: Any
    ) -> None:
        start(self, speculative_config, labelnames, values, *args, **kwargs)
        if not self.spec_decoding_enabled:
            return
        self.reprieve = {}
        for name, text in (
            (_RESCUED, "Drafted tokens accepted although the lossless check rejects them."),
            (_ROUNDS, "Verified requests (a request, a round) judged by the relaxed rule."),
        ):
            counter = self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, "rule"])
            self.reprieve[name] = {
                engine: counter.labels(*labels, self.reprieve_rule) for engine, labels in values.items()
            }

    @functools.wraps(observe)
    def note(self: Any, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
        observe(self, spec_decoding_stats, engine_idx)
        if self.spec_decoding_enabled:
            self.reprieve[_RESCUED][engine_idx].inc(spec_decoding_stats.num_rescued_tokens)
            self.reprieve[_ROUNDS][engine_idx].inc(spec_decoding_stats.num_relaxed_rounds)

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
