"""Quality monitor: a share of requests is also answered losslessly, in the background.

The paired difference so far comes with a confidence sequence, so it can be read after every request and stopped at
any time.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from reprieve.backends.settings import IN_PROCESS
from reprieve.bench.arms import Arm
from reprieve.bench.engine import Engine, Job, RunConfig
from reprieve.bench.records import ProblemRecord
from reprieve.certify.bounds import ConfidenceSequence
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import ReprieveError, SpecError, require_range, require_whole
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.prompting import prompt_of


@dataclass(frozen=True)
class ServedAnswer:
    """Request answered with the relaxed rule. `problem` has its prompt, and its reference, if any."""

    problem: TaskProblem
    params: SamplingParams
    text: str


@dataclass(frozen=True)
class MonitorStatus:
    """Results so far. The interval holds at all times at once, with the monitor's confidence."""

    num_seen: int
    num_checked: int
    num_skipped: int  # selected but not checked because the queue was full
    num_failed: int  # selected, but the check failed
    drop: float  # mean of strict - relaxed over checked requests
    interval: tuple[float, float]
    alarm: bool

    def sentence(self) -> str:
        """One line for logs."""
        low, high = self.interval
        summary = f"{self.num_checked} of {self.num_seen} requests checked: "
        if self.num_checked:
            summary += f"drop {100 * self.drop:+.2f} points [{100 * low:.2f}, {100 * high:.2f}] at any time"
        else:
            summary += "nothing is known of the drop yet"
        if self.num_failed or self.num_skipped:
            summary += f", {self.num_failed} checks failed, {self.num_skipped} skipped"
        return summary + (", ALARM" if self.alarm else "")


class QualityMonitor:
    """Monitor of served requests: pass each to `observe` and read `status` at any time.

    Args:
        check: answers one request losslessly and returns the drop, strict minus relaxed quality, in [-1, 1].
        share: share of requests to check, in (0, 1], drawn at random.
        max_drop: alarm once the drop is proved larger, that is, once the interval's lower end passes it. None for no
            alarm.
        on_alarm: called once, from the monitor's thread.
        max_waiting: requests that may wait for their check; further ones are skipped and counted.
        num_parallel: concurrent checks, if `check` may be called from several threads.
    """

    def __init__(
        self,
        check: Callable[[ServedAnswer], float],
        *,
        share: float = 0.05,
        max_drop: float | None = None,
        confidence: float = 0.95,
        seed: int = 0,
        on_alarm: Callable[[MonitorStatus], None] = lambda status: None,
        max_waiting: int = 64,
        num_parallel: int = 1,
    ) -> None:
        require_range("share", share, 0.0, 1.0, low_open=True)
        if max_drop is not None:
            require_range("max_drop", max_drop, 0.0, 1.0)
        require_whole("max_waiting", max_waiting, 1)
        require_whole("num_parallel", num_parallel, 1)
        self._check = check
        self._share = share
        self._max_drop = max_drop
        self._on_alarm = on_alarm
        self._random = random.Random(seed)
        self._sequence = ConfidenceSequence(confidence=confidence)
        self._waiting: queue.Queue[tuple[int, ServedAnswer] | None] = queue.Queue(max_waiting)
        self._lock = threading.RLock()
        self._num_seen = self._num_skipped = self._num_failed = 0
        self._alarm = False
        self._num_chosen = 0
        self._drops: dict[int, float | None] = {}  # of checks that wait for an earlier one
        self._next = 0  # index of the next drop to count
        self._threads = [
            threading.Thread(target=self._work, name=f"reprieve-monitor-{number}", daemon=True)
            for number in range(num_parallel)
        ]
        for thread in self._threads:
            thread.start()

    def observe(self, served: ServedAnswer) -> None:
        """Record a request and possibly queue its check; returns at once."""
        with self._lock:
            self._num_seen += 1
            if self._random.random() >= self._share:
                return
            try:
                self._waiting.put_nowait((self._num_chosen, served))
                self._num_chosen += 1
            except queue.Full:
                self._num_skipped += 1

    @property
    def status(self) -> MonitorStatus:
        with self._lock:
            return MonitorStatus(
                num_seen=self._num_seen,
                num_checked=self._sequence.num,
                num_skipped=self._num_skipped,
                num_failed=self._num_failed,
                drop=self._sequence.mean,
                interval=self._sequence.interval,
                alarm=self._alarm,
            )

    def close(self, *, check_waiting: bool = True) -> MonitorStatus:
        """Check or drop the waiting requests, stop, and return the final status; may be called again if interrupted."""
        with contextlib.suppress(queue.Empty):
            while not check_waiting:
                self._num_skipped += self._waiting.get_nowait() is not None
        for _ in [thread for thread in self._threads if thread.is_alive()]:
            self._waiting.put(None)  # one each, whoever takes it
        for thread in self._threads:
            thread.join()
        self._threads = []
        return self.status

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            number, served = item
            try:
                drop = self._check(served)
            except Exception:  # a failed check says nothing about quality; serving continues
                drop = None
            for status in self._count(number, drop):
                with contextlib.suppress(Exception):  # a failing callback must not stop the monitor
                    self._on_alarm(status)

    def _count(self, number: int, drop: float | None) -> list[MonitorStatus]:
        """Count drops in the order of requests; return the status if this drop raised the alarm."""
        raised = []
        with self._lock:
            self._drops[number] = drop
            while self._next in self._drops:
                one = self._drops.pop(self._next)
                self._next += 1
                try:
                    if one is not None:
                        self._sequence.update(one)
                except SpecError:  # the check returned an invalid drop
                    one = None
                self._num_failed += one is None
                if self._max_drop is not None and not self._alarm and self._sequence.interval[0] > self._max_drop:
                    self._alarm = True
                    raised.append(self.status)
        return raised


@dataclass(frozen=True)
class MonitorCheck:
    """Lossless answer to a request, compared with the relaxed one.

    With a reference, the drop is strict minus relaxed correctness. Without one, it is 1 if the two answers differ, an
    upper bound on the loss.
    """

    decoder: SpeculativeDecoder  # its own, because it runs in another thread
    task: Task

    def __call__(self, served: ServedAnswer) -> float:
        strict = self.decoder.generate(prompt_of(served.problem), served.params)
        return drop_of(self.task, served.problem, strict.text, served.text)


def drop_of(task: Task, problem: TaskProblem, strict: str, relaxed: str) -> float:
    """Return the drop of a relaxed answer, in [-1, 1]; without a reference, 1 if it differs from the strict one."""
    answers = [task.extract_answer(text) for text in (strict, relaxed)]
    if problem.reference:
        solved = [task.equivalent(answer, problem.reference) for answer in answers]
        return float(solved[0]) - float(solved[1])
    return 0.0 if strict == relaxed or task.same(problem, *answers) else 1.0


def watch(
    engine: Engine,
    config: RunConfig,
    task: Task,
    relaxed: Arm,
    strict: Arm,
    *,
    on_answer: Callable[[MonitorStatus], None] = lambda status: None,
    **settings: Any,
) -> MonitorStatus:
    """Answer a run's problems with one arm, and check them with the other in a `QualityMonitor` with these settings.

    Raises:
        SpecError: a setting out of range.
        EngineError: a server died.
        ReprieveError: every problem failed.
    """
    problems = task.problems(config.split, config.limit, offset=config.offset)
    number_of = {problem.problem_id: number for number, problem in enumerate(problems)}

    def answered(arm: Arm, numbers: Iterable[int]) -> Iterator[ProblemRecord]:
        return engine.answer(config, task, [arm], problems, [Job(arm.label, number, 0) for number in numbers])

    def check(served: ServedAnswer) -> float:
        [record] = answered(strict, [number_of[served.problem.problem_id]])
        if record.error:
            raise ReprieveError(record.error)
        return drop_of(task, served.problem, record.text, served.text)

    if engine.num_parallel > 1:  # answers come faster than checks: skip none
        on_server = engine.facts.engine not in IN_PROCESS  # which batches the checks, too
        num_parallel = engine.num_parallel if on_server else 1
        settings = {"max_waiting": len(problems), "num_parallel": num_parallel, **settings}
    monitor = QualityMonitor(check, **settings)
    params = SamplingParams(max_new_tokens=task.max_new_tokens, stop=tuple(task.stop), **vars(config.sampling))
    errors = []
    try:
        for record in answered(relaxed, range(len(problems))):
            if record.error:
                errors.append(record.error)
            else:
                monitor.observe(ServedAnswer(problems[number_of[record.problem_id]], params, record.text))
            on_answer(monitor.status)
        final = monitor.close()
    except BaseException:  # also while the waiting checks run
        monitor.close(check_waiting=False)
        raise
    if len(errors) == len(problems):
        raise ReprieveError(f"every problem failed; the first error: {errors[0]}")
    return final
