"""A running check on quality: a share of requests is also answered losslessly, in the background.

The paired difference so far is given with a confidence sequence, so that it may be looked at after every request and
stopped at any moment without losing its meaning.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reprieve.calibration.sequence import ConfidenceSequence
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import require_range, require_whole
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.asking import prompt_of


@dataclass(frozen=True)
class Served:
    """A request that was answered with the relaxed rule. `problem` names it, and holds its reference if it has one."""

    problem: TaskProblem
    params: SamplingParams
    text: str
    prompt_ids: list[int] | None = None  # what was answered, where it is not the problem's own prompt


@dataclass(frozen=True)
class MonitorStatus:
    """What is known so far. The interval holds at all times at once, with the monitor's confidence."""

    num_seen: int
    num_checked: int
    num_skipped: int  # chosen, and not checked since too many were waiting
    num_failed: int  # chosen, and the check failed
    drop: float  # mean of strict - relaxed over the checked
    interval: tuple[float, float]
    alarm: bool

    def sentence(self) -> str:
        """For logs."""
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
    """Give every served request to `observe`; read `status` whenever you like.

    Args:
        check: answers one request losslessly and returns the drop, strict minus relaxed quality, in [-1, 1].
        share: of requests to check, in (0, 1], drawn at random.
        max_drop: raise the alarm once the drop is proved larger, with the confidence given: once the interval's lower
            end has passed it. None for no alarm.
        on_alarm: called once, from the monitor's thread.
        max_waiting: requests that may wait for their check; more are let pass unchecked, and counted.
    """

    def __init__(
        self,
        check: Callable[[Served], float],
        *,
        share: float = 0.05,
        max_drop: float | None = None,
        confidence: float = 0.95,
        seed: int = 0,
        on_alarm: Callable[[MonitorStatus], None] = lambda status: None,
        max_waiting: int = 64,
    ) -> None:
        require_range("share", share, 0.0, 1.0, low_open=True)
        if max_drop is not None:
            require_range("max_drop", max_drop, 0.0, 1.0)
        require_whole("max_waiting", max_waiting, 1)
        self._check = check
        self._share = share
        self._max_drop = max_drop
        self._on_alarm = on_alarm
        self._random = random.Random(seed)
        self._sequence = ConfidenceSequence(confidence=confidence)
        self._waiting: queue.Queue[Served | None] = queue.Queue(max_waiting)
        self._lock = threading.Lock()
        self._num_seen = self._num_skipped = self._num_failed = 0
        self._alarm = False
        self._thread = threading.Thread(target=self._work, name="reprieve-monitor", daemon=True)
        self._thread.start()

    def observe(self, served: Served) -> None:
        """Take note of a request, and perhaps have it checked; returns at once."""
        with self._lock:
            self._num_seen += 1
            chosen = self._random.random() < self._share
        if not chosen:
            return
        try:
            self._waiting.put_nowait(served)
        except queue.Full:
            with self._lock:
                self._num_skipped += 1

    @property
    def status(self) -> MonitorStatus:
        with self._lock:
            return self._status()

    def close(self) -> MonitorStatus:
        """Check what is waiting, stop, and say what was found."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
        return self.status

    def _status(self) -> MonitorStatus:
        return MonitorStatus(
            num_seen=self._num_seen,
            num_checked=self._sequence.num,
            num_skipped=self._num_skipped,
            num_failed=self._num_failed,
            drop=self._sequence.mean,
            interval=self._sequence.interval,
            alarm=self._alarm,
        )

    def _work(self) -> None:
        while (served := self._waiting.get()) is not None:
            try:
                drop = self._check(served)
            except Exception:  # a failed check says nothing of quality; serving goes on
                with self._lock:
                    self._num_failed += 1
                continue
            with self._lock:
                self._sequence.update(drop)
                raised = self._max_drop is not None and not self._alarm and self._sequence.interval[0] > self._max_drop
                self._alarm = self._alarm or raised
                status = self._status()
            if raised:
                with contextlib.suppress(Exception):  # a callback that fails must not end the watch
                    self._on_alarm(status)


@dataclass(frozen=True)
class LosslessCheck:
    """Answers a request again, losslessly, and compares.

    With a reference the drop is strict minus relaxed correctness. Without one it is 1 where the two answers differ:
    no less than what quality can have lost.
    """

    decoder: SpeculativeDecoder  # its own, since it works in another thread
    task: Task

    def __call__(self, served: Served) -> float:
        prompt = prompt_of(served.problem) if served.prompt_ids is None else served.prompt_ids
        strict = self.decoder.generate(prompt, served.params)
        answers = [self.task.extract_answer(text) for text in (strict.text, served.text)]
        if served.problem.reference:
            solved = [self.task.equivalent(answer, served.problem.reference) for answer in answers]
            return float(solved[0]) - float(solved[1])
        return 0.0 if strict.text == served.text or self.task.same(served.problem, *answers) else 1.0


def watch(
    decoder: SpeculativeDecoder,
    strict: SpeculativeDecoder,
    task: Task,
    problems: list[TaskProblem],
    sampling: dict[str, Any],
    *,
    on_answer: Callable[[MonitorStatus], None] = lambda status: None,
    **settings: Any,
) -> MonitorStatus:
    """Serve problems with one decoder and have a `QualityMonitor` (its settings by name) check on it.

    Raises:
        SpecError: a setting out of range.
    """
    monitor = QualityMonitor(LosslessCheck(strict, task), **settings)
    params = SamplingParams(max_new_tokens=task.max_new_tokens, stop=tuple(task.stop), **sampling)
    try:
        for problem in problems:
            monitor.observe(Served(problem, params, decoder.generate(prompt_of(problem), params).text))
            on_answer(monitor.status)
    finally:
        final = monitor.close()
    return final
