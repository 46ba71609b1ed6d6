"""Fields of responses and refusals of stray fields, on records and servers that imitate vLLM's."""

import asyncio
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import torch

from reprieve.policies.menu import Menu
from reprieve.rules import parse_rule
from reprieve.vllm_plugin import metrics, startup
from reprieve.vllm_plugin.rounds import WorkerRules, request_settings


def records():
    """Classes like vLLM's, created for each test because they are patched in place."""

    @dataclasses.dataclass
    class Stats:
        num_spec_tokens: int
        per_place: list[int] = dataclasses.field(default_factory=list)

    @dataclasses.dataclass
    class Metrics:
        num_spec_tokens: int
        histogram: list[int] = dataclasses.field(default_factory=list)
        num_draft_tokens: int = 0

        def to_dict(self):
            return {"num_draft_tokens": self.num_draft_tokens}

    class Scheduler:
        log_stats = True

        def __init__(self, metrics, stats):
            self.requests = {"a": SimpleNamespace(spec_decode_metrics=metrics)}
            self.stats = stats

        def update_from_output(self, scheduler_output, model_runner_output):
            return {0: SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=self.stats))}

    metrics._add_field(Stats, "list", list)
    metrics._add_field(Metrics, "dict", dict)
    metrics._summarise(Metrics)
    metrics._fill(Scheduler)
    return Stats, Metrics, Scheduler


def output_of(rules):
    output = SimpleNamespace()
    metrics.attach(output, rules)
    return output


def note(rules, request_id, rescued):
    """A round of one request with three drafted tokens, all accepted."""
    choice = rules.admit(request_id, dict).choice
    label = rules.counter.mark(request_id, choice.name, choice.rule)
    rules.counter.start_copy([request_id], [label], [3], torch.tensor([3]), torch.tensor([rescued]))


def test_a_lenient_response_reports_rule_threshold_rescued_tokens_and_certificate():
    Stats, Metrics, Scheduler = records()
    metrics, stats = Metrics(4), Stats(4)
    scheduler = Scheduler(metrics, stats)
    rules = WorkerRules(Menu.load("judge:path=reprieve/arithmetic-judge,threshold=0.04"))
    for rescued in ([True, False, True, False], [True, False, False, False]):
        note(rules, "a", rescued)
        scheduler.update_from_output(None, output_of(rules))
    assert metrics.to_dict() == {
        "num_draft_tokens": 0,
        "reprieve_rule": "judge@0.04",
        "reprieve_threshold": 0.04,
        "reprieve_certified": True,
        "num_rescued_tokens": 3,
    }
    assert [(rule, sum(rescued)) for rule, _, rescued in stats.reprieve] == [("judge@0.04", 2), ("judge@0.04", 1)]
    assert Metrics(4).reprieve == {} and Metrics(4).histogram == [] and Stats(4).reprieve == []


def test_a_response_that_no_rule_touched_reports_lossless():
    _, Metrics, _ = records()
    assert Metrics(4).to_dict() == {"num_draft_tokens": 0, **metrics.LOSSLESS}


def test_a_lenient_request_is_marked_before_its_counts_arrive():
    """Counts may still be on their way from the device when an answer ends."""
    Stats, Metrics, Scheduler = records()
    metrics = Metrics(4)
    rules = WorkerRules(Menu.load("margin:delta=2"))
    rules.counter.mark("a", "margin", parse_rule("margin:delta=2"))
    Scheduler(metrics, Stats(4)).update_from_output(None, output_of(rules))
    told = metrics.to_dict()
    assert (told["reprieve_rule"], told["reprieve_certified"], told["num_rescued_tokens"]) == ("margin@2", False, 0)


def test_counts_wait_for_a_step_that_has_statistics_and_are_dropped_without_any():
    Stats, Metrics, Scheduler = records()
    scheduler, stats = Scheduler(Metrics(4), None), Stats(4)
    rules = WorkerRules(Menu.load("margin:delta=2"))
    note(rules, "gone", [True, False, False, False])
    scheduler.update_from_output(None, output_of(rules))
    scheduler.stats = stats
    scheduler.update_from_output(None, SimpleNamespace())
    assert len(stats.reprieve) == 1
    scheduler.log_stats, scheduler.stats = False, None
    note(rules, "gone", [True, False, False, False])
    scheduler.update_from_output(None, output_of(rules))
    assert scheduler._reprieve_counts == []


def test_marks_are_bounded_on_ranks_without_output():
    rules = WorkerRules(Menu.load("margin:delta=2"))
    for number in range(4100):
        rules.counter.mark(str(number), "margin", parse_rule("margin:delta=2"))
        rules.forget([str(number)])
    assert len(rules.counter.take()) == 4096 and rules.counter.take() == {}


def test_a_stray_field_is_an_error_that_says_where_it_belongs(monkeypatch):
    class BaseServing:
        def create_error_response(self, message, param=None):
            return message, param

        async def _check_model(self, request):
            return None

    module = ModuleType("vllm.entrypoints.serve.engine.serving")
    module.BaseServing = BaseServing
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.serve", "vllm.entrypoints.serve.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    startup._refuse_stray_fields()
    startup._refuse_stray_fields()

    def ask(**extra):
        return asyncio.run(BaseServing()._check_model(SimpleNamespace(model_extra=extra or None)))

    assert ask() is None and ask(other=1, extra_body={"other": 1}) is None
    wanted = {"reprieve_leniency": "strict"}
    for extra in (wanted, {"extra_args": wanted}, {"extra_body": {"vllm_xargs": wanted}}):
        message, param = ask(**extra)
        assert param == "reprieve_leniency" and "must be given in vllm_xargs" in message


def test_request_settings_include_structured_outputs():
    plain = SimpleNamespace(extra_args=None, structured_outputs=None)
    assert request_settings(plain) == {"structured_outputs": False}
    grammar = SimpleNamespace(extra_args={"reprieve_rule": "on"}, structured_outputs=object())
    assert request_settings(grammar) == {"reprieve_rule": "on", "structured_outputs": True}
