"""Quality monitoring of served answers."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from reprieve.backends.local import LocalEngine
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.summary import summarise
from reprieve.certify.monitor import MonitorCheck, QualityMonitor, ServedAnswer, watch
from reprieve.errors import SpecError
from reprieve.settings import SamplingParams
from reprieve.tasks import TaskProblem
from tests.bench.toys import run, settings
from tests.kit.records import a_record
from tests.kit.toys import ToyTask


def served(number=0):
    return ServedAnswer(TaskProblem(f"p{number}", "1 2 3", "1"), SamplingParams(max_new_tokens=8), "")


def test_the_alarm_is_raised_once_when_the_drop_is_proved():
    alarms = []
    monitor = QualityMonitor(lambda _: 1.0, share=1.0, max_drop=0.2, on_alarm=alarms.append, max_waiting=1000)
    for number in range(60):
        monitor.observe(served(number))
    final = monitor.close()
    assert final.alarm and len(alarms) == 1 and alarms[0].interval[0] > 0.2
    assert (final.num_seen, final.num_checked, final.drop) == (60, 60, 1.0)
    assert "ALARM" in final.sentence()


def test_no_alarm_without_a_drop_and_only_a_share_is_checked():
    monitor = QualityMonitor(lambda _: 0.0, share=0.25, max_drop=0.05, seed=1, max_waiting=1000)
    for number in range(400):
        monitor.observe(served(number))
    final = monitor.close()
    assert not final.alarm and 60 < final.num_checked < 140


def test_failed_and_skipped_checks_are_counted_and_never_block_serving():
    gate = threading.Event()

    def check(_):
        gate.wait(10)
        raise RuntimeError("broken")

    monitor = QualityMonitor(check, share=1.0, max_waiting=2)
    for number in range(10):
        monitor.observe(served(number))
    gate.set()
    final = monitor.close()
    assert final.num_failed + final.num_skipped == 10 and final.num_skipped >= 7 and final.num_checked == 0


def test_a_monitor_closes_whichever_thread_ends_first():
    gate = threading.Event()
    monitor = QualityMonitor(lambda _: float(not gate.wait(20)), share=1.0, num_parallel=4)
    monitor.observe(served())
    put = monitor._waiting.put

    def slowly(item):
        put(item)
        time.sleep(0.05)  # for an idle thread to take it and end

    monitor._waiting.put = slowly
    closing = threading.Thread(target=monitor.close, daemon=True)
    closing.start()
    time.sleep(0.5)
    gate.set()
    closing.join(20)
    assert not closing.is_alive()


def test_checks_run_in_parallel_and_count_in_request_order():
    all_wait, together, others = threading.Event(), threading.Barrier(3, timeout=10), threading.Event()

    def check(asked):
        number = int(asked.problem.problem_id[1:])
        if number == 0:
            all_wait.wait(10)
            return 0.0
        together.wait()  # three at once, or it breaks
        if number == 1:
            others.wait(10)  # the first of them ends last
        else:
            others.set()
        return number / 10

    monitor = QualityMonitor(check, share=1.0, max_waiting=10, num_parallel=3)
    counted = []
    monitor._sequence.update, update = lambda drop: (counted.append(drop), update(drop)), monitor._sequence.update
    monitor.observe(served(0))
    while not monitor._waiting.empty():
        time.sleep(0.01)
    for number in (1, 2, 3):
        monitor.observe(served(number))
    all_wait.set()
    final = monitor.close()
    assert (final.num_checked, final.num_failed) == (4, 0) and counted == [0.0, 0.1, 0.2, 0.3]


@pytest.mark.slow
def test_watching_a_task_checks_every_answer(pair, tmp_path):
    arms = make_arms(["random:rate=0.9"], [4])
    whole = run(pair, arms, tmp_path, limit=15)
    row = summarise(whole).arms[-1]
    engine = LocalEngine(pair)
    config = RunConfig.of(engine, arms, settings(limit=15))
    final = watch(engine, config, ToyTask(), arms[-1], arms[2], share=1.0, max_drop=None, max_waiting=100)
    assert final.num_checked == 15 and abs(final.drop) <= 1
    assert final.interval[0] <= final.drop <= final.interval[1] and not final.alarm
    assert row.net_drop is not None


class Interrupted:
    """An engine that is interrupted after some answers, while the checks of most of them wait."""

    num_parallel = 4
    facts = SimpleNamespace(engine="batched")

    def __init__(self, num_answers=10):
        self.num_answers = num_answers
        self.num_checked = self.num_running = self.most_running = 0
        self._gate = threading.Event()

    def answer(self, config, task, arms, problems, jobs):
        for job in jobs:
            problem_id = problems[job.number].problem_id
            if arms[0].label == "lossless":
                self.num_running += 1
                self.most_running = max(self.most_running, self.num_running)
                self._gate.wait(20)
                time.sleep(0.05)
                self.num_checked += 1
                self.num_running -= 1
            yield a_record(arm=arms[0].label, problem_id=problem_id)
            if job.number + 1 == self.num_answers and arms[0].label != "lossless":
                time.sleep(0.2)  # for further checks to begin, if they may
                self._gate.set()
                raise KeyboardInterrupt


def test_an_interrupted_watch_drops_the_waiting_checks(pair):
    arms = make_arms(["random:rate=0.9"], [4])
    config = RunConfig.of(LocalEngine(pair), arms, settings(limit=15))
    engine = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        watch(engine, config, ToyTask(), arms[-1], arms[2], share=1.0, max_drop=None)
    assert engine.most_running == 1, "one check at a time in this process"
    assert engine.num_checked <= 2, "and none after the interruption"


def test_an_interruption_of_the_last_checks_drops_those_that_wait(pair, monkeypatch):
    arms = make_arms(["random:rate=0.9"], [4])
    config = RunConfig.of(LocalEngine(pair), arms, settings(limit=15))
    engine = Interrupted(num_answers=None)
    engine._gate.set()
    close = QualityMonitor.close

    def interrupted(self, *, check_waiting=True):
        if check_waiting:
            raise KeyboardInterrupt
        return close(self, check_waiting=False)

    monkeypatch.setattr(QualityMonitor, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watch(engine, config, ToyTask(), arms[-1], arms[2], share=1.0, max_drop=None)
    assert engine.num_checked <= 3


def test_without_references_a_changed_answer_counts_as_lost(pair):
    class Unlabelled(ToyTask):
        def same(self, problem, answer, other):
            return answer == other

    check = MonitorCheck(make_arms([], [4])[2].decoder(pair), Unlabelled())
    problem = TaskProblem("p", "1 2 3", "")
    params = SamplingParams(max_new_tokens=8)
    strict = check.decoder.generate(problem.prompt, params).text
    odd = str(int(strict.split()[-1]) + 1)
    assert check(ServedAnswer(problem, params, strict)) == 0.0
    assert check(ServedAnswer(problem, params, odd)) == 1.0


@pytest.mark.parametrize("values", [dict(share=0.0), dict(share=2), dict(max_drop=-1), dict(max_waiting=0)])
def test_monitor_settings_out_of_range_are_refused(values):
    with pytest.raises(SpecError, match=next(iter(values))):
        QualityMonitor(lambda _: 0.0, **values)
