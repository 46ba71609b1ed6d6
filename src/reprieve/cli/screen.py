"""Consoles, progress, questions on a terminal, and loading, as all verbs share them."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reprieve.errors import SpecError, require_choice
from reprieve.settings import PairSettings, ProblemSettings

if TYPE_CHECKING:
    from rich.console import Console

    from reprieve.backends.settings import EngineSettings
    from reprieve.bench.engine import Engine
    from reprieve.engine import Pair
    from reprieve.tasks import TaskProblem
    from reprieve.tasks.prompting import PromptedTask


MOST_CUT_OFF = 0.05  # of the answers; more is said loudly
_REPORT_SECONDS = 60  # between lines of progress where there is no terminal


def console(*, stderr: bool = False, color: bool | None = None) -> Console:
    """A console, coloured as `color` says; by default where the terminal has colours and NO_COLOR is not set."""
    from rich.console import Console

    return Console(
        stderr=stderr,
        no_color=None if color is None else not color,
        force_terminal=color or None,
        color_system="standard" if color else "auto",
        highlight=False,
    )


def command_line() -> str:
    """Return the command as typed, for the results: a verb, or a script of `benchmarks/`."""
    path = Path(sys.argv[0]).parts
    start = next((path.index(name) for name in ("benchmarks", "recipes") if name in path), None)
    return shlex.join(["reprieve" if start is None else "/".join(path[start:]), *sys.argv[1:]])


def say(text: str) -> None:
    """Print a line to standard output, neither wrapped nor styled."""
    console().print(text, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """Print a line to standard error, neither wrapped nor styled."""
    console(stderr=True).print(text, soft_wrap=True, markup=False)


def confirm(question: str) -> bool:
    """Ask on a terminal; False where there is none, and where the reply is not yes."""
    if not sys.stdin.isatty():
        return False
    return console(stderr=True).input(f"{question} \\[y/N] ").strip().lower() in ("y", "yes")


def progress_line(done: float, total: float | None, unit: str, seconds: float, before: float, since: float) -> str:
    """One line of progress where there is no terminal; the time left is estimated from all that this run did.

    Args:
        before: of `done`, how many were done at the first report, by an earlier run or as this run's first.
        since: seconds since that report.
    """
    of = "" if total is None else f" of {total:.0f}"
    left = ""
    if total and before < done < total:
        left = f", about {since * (total - done) / (done - before):.0f} s left"
    return f"{done:.0f}{of} {unit} after {seconds:.0f} s{left}"


@contextlib.contextmanager
def progress(title: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a callback `(done, total)` that updates a progress bar on stderr.

    Where there is no terminal, it prints a line a minute instead, and one at the end.

    Args:
        unit: what is counted, if not the title.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    terminal = console(stderr=True)
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), *times)
    bar = Progress(*columns, console=terminal, disable=not terminal.is_terminal, speed_estimate_period=math.inf)
    bar.add_task("", total=None)
    [task] = bar.tasks
    started, ended = time.monotonic(), threading.Event()
    shown: tuple[int, int] | None = None  # the last finished total
    first: tuple[int, float] | None = None  # what was done at the first report, and when
    failures: list[BaseException] = []  # of the thread, such as a closed stderr

    def show() -> None:
        now = time.monotonic()
        before, since = first or (0, started)
        line = progress_line(task.completed, task.total, unit or title, now - started, before, now - since)
        terminal.print(line)

    def show_each_minute() -> None:
        try:
            while not ended.wait(_REPORT_SECONDS):
                show()
        except BaseException as error:
            failures.append(error)

    def report(done: int, total: int) -> None:
        nonlocal shown, first
        if failures:
            raise failures[0]
        first = first or (done, time.monotonic())
        bar.update(task.id, completed=done, total=total)
        if not terminal.is_terminal and done == total and shown != (done, total):
            shown = done, total
            show()

    with bar:
        if not terminal.is_terminal:
            threading.Thread(target=show_each_minute, daemon=True).start()
        try:
            yield report
        finally:
            ended.set()


def load_problems(
    pair: PairSettings, chosen: ProblemSettings, *, decodes: bool = True
) -> tuple[Pair, PromptedTask, list[TaskProblem]]:
    """Load the task, then the pair, so that a misspelt task or split fails early, and some of the task's problems.

    Prompts are formatted for the target, and answers shortened to what fits into the pair's context.

    Raises:
        SpecError: a split that the task lacks, or no problems.
    """
    from reprieve.tasks import load_task
    from reprieve.tasks.prompting import problems_of, with_prompts

    plain = load_task(chosen.task)
    require_choice("split", chosen.split, plain.splits)
    loaded = load(pair, decodes=decodes)
    task = with_prompts(plain, loaded.tokenizer, chosen.prompt)
    return loaded, task, problems_of(task, chosen, loaded.num_positions)


def make_engine(engine: EngineSettings, pair: PairSettings, *, num_workers: int = 1) -> Engine:
    """Return the engine that `--engine` names, for a pair; close it when done.

    Args:
        num_workers: processes of the local engine.

    Raises:
        SpecError: several workers with another engine, or for a target on several devices.
        ReprieveError: a model that cannot be found, or a running server that does not answer.
    """
    quiet_transformers()
    from reprieve.backends.deployers import make_deployer
    from reprieve.backends.local import BatchedEngine, LocalEngine
    from reprieve.backends.served import ServedEngine
    from reprieve.backends.settings import BatchedSettings
    from reprieve.models.stored import stored_identity

    if engine.local:
        if num_workers > 1 and pair.device_map is not None:
            raise SpecError(f"workers must be 1 with --device-map, got {num_workers}: each worker loads the target")
        return LocalEngine(load(pair), num_workers=num_workers)
    if num_workers > 1:
        raise SpecError("--workers applies to --engine local only; set parallel= in --engine instead")
    if isinstance(engine.kind, BatchedSettings):
        return BatchedEngine(load(pair, decodes=False), engine.kind.parallel)
    identity, tokenizer, dtype = stored_identity(pair)
    return ServedEngine(make_deployer(engine.servers, pair, dtype), tokenizer, identity, announce=warn)


@contextlib.contextmanager
def engine_and_task(
    engine: EngineSettings, pair: PairSettings, problems: ProblemSettings, *, num_workers: int = 1
) -> Iterator[tuple[Engine, PromptedTask]]:
    """Load the task, then start the engine; the engine is closed on exit."""
    from reprieve.tasks import load_task
    from reprieve.tasks.prompting import with_prompts

    plain = load_task(problems.task)
    with contextlib.closing(make_engine(engine, pair, num_workers=num_workers)) as started:
        yield started, with_prompts(plain, started.tokenizer, problems.prompt)


def load(pair: PairSettings, *, decodes: bool = True) -> Pair:
    """Load the pair without transformers' progress bars and warnings.

    Args:
        decodes: see `engine.pair.load_configured`.
    """
    quiet_transformers()
    from reprieve.engine.pair import load_configured

    return load_configured(pair, warn, decodes=decodes)


def quiet_transformers() -> None:
    """Disable the warnings and progress bars of transformers; Reprieve prints its own messages."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
