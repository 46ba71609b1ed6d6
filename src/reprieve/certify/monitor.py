"""Quality monitor: answers problems with a rule, and a share of them losslessly too.

The paired difference so far comes with a confidence sequence, so it can be read after every answer and stopped at any
time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from reprieve.bench.arms import Arm
from reprieve.bench.engine import Engine, Job, RunConfig
from reprieve.bench.records import ProblemRecord
from reprieve.bench.settings import MonitorSettings
from reprieve.certify.bounds import ConfidenceSequence
from reprieve.errors import ReprieveError, SpecError
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.prompting import problems_of


@dataclass(frozen=True)
class MonitorStatus:
    """Results so far. The interval holds at all times at once, with the monitor's confidence.

    Args:
        num_answered: relaxed answers, those that failed included.
        num_failed: checks whose relaxed or lossless answer failed.
        drop: mean of strict - relaxed quality over the checked problems.
        alarm: whether the drop is proved larger than allowed: the interval's lower end is above `max_drop`.
    """

    num_problems: int
    num_answered: int
    num_checked: int
    num_failed: int
    drop: float
    interval: tuple[float, float]
    alarm: bool

    def sentence(self) -> str:
        """One line for logs."""
        low, high = self.interval
        summary = f"{self.num_checked} of {self.num_answered} answers checked: "
        if self.num_checked:
            summary += f"drop {100 * self.drop:+.2f} points [{100 * low:.2f}, {100 * high:.2f}] at any time"
        else:
            summary += "nothing is known of the drop yet"
        if self.num_failed:
            summary += f", {self.num_failed} checks failed"
        return summary + (", ALARM" if self.alarm else "")


def watch(
    engine: Engine,
    config: RunConfig,
    task: Task,
    relaxed: Arm,
    strict: Arm,
    settings: MonitorSettings,
    *,
    on_status: Callable[[MonitorStatus], None] = lambda status: None,
) -> MonitorStatus:
    """Answer a run's problems with one arm, and a random share of them with the other; return the final status.

    Problems are answered in random order, and differences counted in that order, so that fast answers are not counted
    first. An alarm stays.

    Args:
        on_status: called after each answer, relaxed or lossless.

    Raises:
        SpecError: no problems, or two with one id.
        EngineError: a server died.
        ReprieveError: every problem failed.
    """
    problems = problems_of(task, config, engine.num_positions)
    number_of = {problem.problem_id: number for number, problem in enumerate(problems)}
    if len(number_of) < len(problems):
        raise SpecError(f"problems must have different ids, got {len(problems)} problems with {len(number_of)} ids")
    draw = random.Random(config.seed)
    order = draw.sample(range(len(problems)), len(problems))
    records: dict[int, dict[str, ProblemRecord]] = {number: {} for number in order if draw.random() < settings.share}
    jobs = [
        Job(arm.label, number, 0) for number in order for arm in ([relaxed, strict] if number in records else [relaxed])
    ]
    sequence = ConfidenceSequence(confidence=settings.confidence)
    status = MonitorStatus(len(problems), 0, 0, 0, sequence.mean, sequence.interval, alarm=False)
    waiting = deque(records)  # problems to be counted
    errors = []
    for record in engine.answer(config, task, [relaxed, strict], problems, jobs):
        number, num_failed, alarm = number_of[record.problem_id], status.num_failed, status.alarm
        if record.error and record.arm == relaxed.label:
            errors.append(record.error)
        if number in records:
            records[number][record.arm] = record
        while waiting and len(records[waiting[0]]) == 2:
            number = waiting.popleft()
            relaxed_record, strict_record = (records[number][arm.label] for arm in (relaxed, strict))
            if relaxed_record.error or strict_record.error:
                num_failed += 1
            else:
                sequence.update(drop_of(task, problems[number], strict_record, relaxed_record))
                alarm = alarm or (settings.max_drop is not None and sequence.interval[0] > settings.max_drop)
        num_answered = status.num_answered + (record.arm == relaxed.label)
        counts = status.num_problems, num_answered, sequence.num, num_failed
        status = MonitorStatus(*counts, sequence.mean, sequence.interval, alarm)
        on_status(status)
    if len(errors) == len(problems):
        raise ReprieveError(f"every problem failed; the first error: {errors[0]}")
    return status


def drop_of(task: Task, problem: TaskProblem, strict: ProblemRecord, relaxed: ProblemRecord) -> float:
    """Return the drop of a relaxed answer, in [-1, 1]; without a reference, 1 if it differs from the strict one."""
    if problem.reference:
        return float(strict.correct) - float(relaxed.correct)
    return 0.0 if strict.text == relaxed.text or task.same(problem, strict.answer, relaxed.answer) else 1.0
