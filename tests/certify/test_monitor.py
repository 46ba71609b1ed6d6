"""Quality monitor: a share of answers is checked against lossless decoding."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from reprieve.backends.local import LocalEngine
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.settings import MonitorSettings
from reprieve.bench.summary import summarise
from reprieve.certify.monitor import drop_of, watch
from reprieve.errors import ReprieveError, SpecError
from reprieve.tasks import TaskProblem
from tests.bench.toys import run, settings
from tests.kit.records import a_record
from tests.kit.toys import ToyTask

RELAXED, STRICT = SimpleNamespace(label="margin"), SimpleNamespace(label="lossless")
ALL = MonitorSettings(share=1.0, max_drop=None)


class Answers:
    """An engine with prepared answers, which come in any order."""

    num_positions = None

    def __init__(self, drops, *, failed=(), seed=None):
        self.drops, self.failed, self.seed = drops, failed, seed
        self.jobs = []

    def answer(self, config, task, arms, problems, jobs):
        self.jobs = list(jobs)
        if self.seed is not None:
            random.Random(self.seed).shuffle(jobs)
        for job in jobs:
            correct = self.drops[job.number] == 0.0 or job.arm == "lossless"
            error = "broken" if (job.arm, job.number) in self.failed else None
            yield a_record(arm=job.arm, problem_id=problems[job.number].problem_id, correct=correct, error=error)


def watched(engine, given=ALL, *, seed=0):
    statuses = []
    config = SimpleNamespace(split="test", limit=len(engine.drops), offset=0, seed=seed)
    final = watch(engine, config, ToyTask(), RELAXED, STRICT, given, on_status=statuses.append)
    assert statuses[-1] == final
    return final, statuses


def test_the_alarm_stays_once_the_drop_is_proved():
    final, statuses = watched(Answers([1.0] * 60), MonitorSettings(share=1.0, max_drop=0.2))
    alarms = [status.alarm for status in statuses]
    assert final.alarm and alarms == sorted(alarms)
    assert statuses[alarms.index(True)].interval[0] > 0.2
    assert (final.num_answered, final.num_checked, final.drop) == (60, 60, 1.0)
    assert "60 of 60 answers checked: drop +100.00 points" in final.sentence() and "ALARM" in final.sentence()


def test_no_alarm_without_a_drop_and_only_a_share_is_checked():
    engine = Answers([0.0] * 400)
    final, _ = watched(engine, MonitorSettings(share=0.25, max_drop=0.05), seed=1)
    assert not final.alarm and 60 < final.num_checked < 140 and final.num_answered == 400
    assert sum(job.arm == "lossless" for job in engine.jobs) == final.num_checked
    again = Answers([0.0] * 400)
    watched(again, MonitorSettings(share=0.25), seed=1)
    assert again.jobs == engine.jobs, "the same problems with the same seed"


def test_answers_count_in_the_order_that_was_drawn_not_as_they_finish():
    drops = [1.0, 0.0, 0.0, 1.0] * 10
    shuffled, in_order = Answers(drops, seed=3), Answers(drops)
    final, statuses = watched(shuffled)
    expected, _ = watched(in_order)
    assert (final.interval, final.drop) == (expected.interval, expected.drop)
    drawn = list(dict.fromkeys(job.number for job in in_order.jobs))
    assert drawn != sorted(drawn), "a file may be ordered by difficulty"
    for status in statuses:
        assert status.drop * status.num_checked == sum(drops[number] for number in drawn[: status.num_checked])


def test_problems_with_one_id_are_refused():
    class Twice(ToyTask):
        def problems(self, split, limit, *, offset=0):
            return super().problems(split, 1) * 2

    config = SimpleNamespace(split="test", limit=2, offset=0, seed=0)
    with pytest.raises(SpecError, match="different ids, got 2 problems with 1 ids"):
        watch(Answers([0.0, 0.0]), config, Twice(), RELAXED, STRICT, ALL)


def test_failed_answers_are_counted_and_say_nothing_about_quality():
    final, _ = watched(Answers([0.0] * 5, failed={("margin", 1), ("lossless", 2)}))
    assert (final.num_answered, final.num_checked, final.num_failed) == (5, 3, 2)
    assert "2 checks failed" in final.sentence()
    with pytest.raises(ReprieveError, match="every problem failed; the first error: broken"):
        watched(Answers([0.0] * 2, failed={("margin", 0), ("margin", 1)}))


def test_nothing_checked_is_said_so():
    final, _ = watched(Answers([0.0]), MonitorSettings(share=1e-9))
    assert final.sentence() == "0 of 1 answers checked: nothing is known of the drop yet"


@pytest.mark.slow
def test_watching_a_task_checks_every_answer(pair, tmp_path):
    arms = make_arms(["random:rate=0.9"], [4])
    whole = run(pair, arms, tmp_path, limit=15)
    row = summarise(whole).arms[-1]
    engine = LocalEngine(pair)
    config = RunConfig.of(engine, arms, settings(limit=15))
    final = watch(engine, config, ToyTask(), arms[-1], arms[2], ALL)
    assert final.num_checked == 15 and final.drop == pytest.approx(row.net_drop[0])
    assert final.interval[0] <= final.drop <= final.interval[1] and not final.alarm


def test_without_references_a_changed_answer_counts_as_lost():
    class Unlabelled(ToyTask):
        def same(self, problem, answer, other):
            return answer == other

    problem = TaskProblem("p", "1 2 3", "")
    strict = a_record(text="so 7", answer="7")
    assert drop_of(Unlabelled(), problem, strict, strict) == 0.0
    assert drop_of(Unlabelled(), problem, strict, a_record(text="thus 7", answer="7")) == 0.0
    assert drop_of(Unlabelled(), problem, strict, a_record(text="so 8", answer="8")) == 1.0


@pytest.mark.parametrize("values", [dict(share=0.0), dict(share=2.0), dict(max_drop=-1.0), dict(confidence=1.0)])
def test_monitor_settings_out_of_range_are_refused(values):
    with pytest.raises(SpecError, match=next(iter(values))):
        MonitorSettings(**values)
