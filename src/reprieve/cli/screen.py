"""Consoles, progress, questions on a terminal, and loading, as all verbs share them."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reprieve.errors import ReprieveError, SpecError, require_choice
from reprieve.settings import PairSettings, ProblemSettings, PromptSettings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from reprieve.backends.settings import EngineSettings
    from reprieve.bench.engine import Engine
    from reprieve.engine import Pair
    from reprieve.tasks import TaskProblem
    from reprieve.tasks.prompting import PromptedTask


MOST_CUT_OFF = 0.05  # of the answers; more is said loudly
_REPORT_SECONDS = 60  # between lines of progress where there is no terminal


def console(*, stderr: bool = False, color: bool | None = None, width: int | None = None) -> Console:
    """A console, coloured as `color` says; by default where the terminal has colours and NO_COLOR is not set."""
    from rich.console import Console

    return Console(
        stderr=stderr,
        no_color=None if color is None else not color,
        force_terminal=color or None,
        color_system="standard" if color else "auto",
        highlight=False,
        width=width,
    )


def command_line() -> str:
    """Return the command as typed, for the results: a verb, or a script of `benchmarks/`."""
    path = Path(sys.argv[0]).parts
    start = next((path.index(name) for name in ("benchmarks", "recipes") if name in path), None)
    return shlex.join(["reprieve" if start is None else "/".join(path[start:]), *sys.argv[1:]])


def require_file(path: Path | None) -> None:
    """Refuse, before any work, a path to which no file can be written; None means no file.

    Raises:
        SpecError: a folder, or a path below a file.
        ReprieveError: its folder cannot be made.
    """
    if path is None:
        return
    if path.is_dir() or (path.parent.exists() and not path.parent.is_dir()):
        raise SpecError(f"--out must name a file, got {str(path)!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReprieveError(f"--out {str(path)!r} cannot be written: {error.strerror}") from None


def say(text: str) -> None:
    """Print a line to standard output, neither wrapped nor styled."""
    console().print(text, soft_wrap=True, markup=False)


def offer_length(rule: str, folder: Path) -> None:
    """Print the command that trains a draft length head for a rule whose head was trained into this folder."""
    command = f"reprieve train length --rule {rule} --out {folder}-length"
    say(f"to train its draft length, with the same pair and task: {command}")


def warn(text: str) -> None:
    """Print a line to standard error, neither wrapped nor styled."""
    console(stderr=True).print(text, soft_wrap=True, markup=False)


def confirm(question: str) -> bool:
    """Ask on a terminal; False where there is none, and where the reply is not yes."""
    if not sys.stdin.isatty():
        return False
    return console(stderr=True).input(f"{question} \\[y/N] ").strip().lower() in ("y", "yes")


def progress_bar(what: str) -> Progress:
    """A bar with an estimate of the time left, on stderr; drawn only on a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console(stderr=True),
        disable=not console(stderr=True).is_terminal,
    )


def reporter(bar: Progress, what: str = "answers") -> Callable[[int, int], None]:
    """Return a callback that moves the bar; where there is no terminal, it prints a line at most once a minute."""
    task = bar.add_task("", total=None)
    printed = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal printed
        bar.update(task, completed=done, total=total)
        if bar.console.is_terminal:
            return
        due = time.monotonic() - printed >= _REPORT_SECONDS
        if due or done == total:
            printed = time.monotonic()
            left = bar.tasks[0].time_remaining
            bar.console.print(f"{done} of {total} {what}" + (f", about {left:.0f} s left" if left else ""))

    return report


def load_pair_and_task(
    pair: PairSettings, task: str, prompt: PromptSettings, *, split: str | None = None, decodes: bool = True
) -> tuple[Pair, PromptedTask]:
    """Load the task, then the pair, so that a misspelt task or split fails early; prompts are formatted for the target.

    Raises:
        SpecError: a split that the task lacks.
    """
    from reprieve.tasks import load_task
    from reprieve.tasks.prompting import with_prompts

    plain = load_task(task)
    if split is not None:
        require_choice("split", split, plain.splits)
    loaded = load(pair, decodes=decodes)
    return loaded, with_prompts(plain, loaded.tokenizer, prompt)


def load_for(pair: PairSettings, chosen: ProblemSettings, *, decodes: bool = True) -> tuple[Pair, PromptedTask]:
    """Load the pair and the task that some problems come from; see `load_pair_and_task`."""
    return load_pair_and_task(pair, chosen.task, chosen.prompt, split=chosen.split, decodes=decodes)


def problems_for(pair: Pair, task: PromptedTask, chosen: ProblemSettings) -> list[TaskProblem]:
    """Return the chosen problems of a task, and reduce its answer length to what fits into the pair's context.

    Raises:
        SpecError: there are none.
    """
    from reprieve.bench.runner import no_problems

    problems = task.problems(chosen.split, chosen.limit, offset=chosen.offset)
    if not problems:
        raise SpecError(no_problems(task, chosen.split, chosen.offset))
    if pair.num_positions is not None:
        task.fit(problems, pair.num_positions)
    return problems


@contextlib.contextmanager
def engine_and_task(
    engine: EngineSettings, pair: PairSettings, task: str, prompt: PromptSettings, *, num_workers: int = 1
) -> Iterator[tuple[Engine, PromptedTask]]:
    """Load the task, then start the engine; the engine is closed on exit."""
    from reprieve.tasks import load_task
    from reprieve.tasks.prompting import with_prompts

    plain = load_task(task)
    quiet_transformers()
    from reprieve.backends.making import make_engine

    started = make_engine(engine, pair, num_workers=num_workers, announce=warn)
    try:
        yield started, with_prompts(plain, started.tokenizer, prompt)
    finally:
        started.close()


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
