"""What verbs print and ask of the machine: consoles, progress, tables, loading."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.errors import ReprieveError, SpecError, require_whole
from reprieve.settings import MAX_PROBLEMS, PairSettings, PromptSettings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from reprieve.backends.settings import EngineSettings
    from reprieve.bench.engine import Engine
    from reprieve.engine import Pair
    from reprieve.tasks import Task
    from reprieve.tasks.asking import AskedTask


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


def split_of(task: Task, asked: str | None, usual: str) -> str:
    """The split asked for; else the usual one, or the only one of a task that has no such names."""
    if asked is not None:
        return asked
    return usual if usual in task.splits else task.splits[0]


def require_problems(limit: int, offset: int) -> None:
    """Refuse numbers of problems that are none.

    Raises:
        SpecError: names the flag.
    """
    require_whole("--limit", limit, 1, MAX_PROBLEMS)
    require_whole("--offset", offset, 0, MAX_PROBLEMS)


def require_file(path: Path | None) -> None:
    """Refuse, before any work, a path at which one file cannot be written; None writes nothing.

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
    """A line on standard output, as it is: not wrapped, not styled."""
    console().print(text, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """A line on standard error, as it is."""
    console(stderr=True).print(text, soft_wrap=True, markup=False)


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
    pair: PairSettings, task: str, prompt: PromptSettings | None = None, *, decodes: bool = True
) -> tuple[Pair, AskedTask]:
    """Both, the task first: a misspelt one fails before a large model is read; its problems are put to the target."""
    from reprieve.tasks import load_task
    from reprieve.tasks.asking import ask

    plain = load_task(task)
    loaded = load(pair, decodes=decodes)
    return loaded, ask(plain, loaded.tokenizer, prompt)


@contextlib.contextmanager
def engine_and_task(
    engine: EngineSettings, pair: PairSettings, task: str, prompt: PromptSettings, *, num_workers: int = 1
) -> Iterator[tuple[Engine, AskedTask]]:
    """Both, the task first; what the engine starts is ended afterwards."""
    from reprieve.tasks import load_task
    from reprieve.tasks.asking import ask

    plain = load_task(task)
    quiet_transformers()
    from reprieve.backends.making import make_engine

    made = make_engine(engine, pair, num_workers=num_workers, announce=warn)
    try:
        yield made, ask(plain, made.tokenizer, prompt)
    finally:
        made.close()


def load(pair: PairSettings, *, decodes: bool = True) -> Pair:
    """The pair, without transformers' own bars and warnings.

    Args:
        decodes: see `engine.threads.load_asked`.
    """
    quiet_transformers()
    from reprieve.engine.threads import load_asked

    return load_asked(pair, warn, decodes=decodes)


def quiet_transformers() -> None:
    """No warnings or bars from loading; our own messages say what matters."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def results_table(document: dict[str, Any], *, width: int) -> Table:
    """The arms of a results document, one row each; narrow terminals get fewer columns."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{document['task']}, {document['split']} split, n = {document['num_problems']}; "
        f"K = {document['num_draft_tokens']}; brackets are 95% intervals",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    cells = [_row(arm) for arm in document["arms"]]
    essential = ("arm", "solved, %", "cut off", "tokens/round", "speedup vs target")
    names = [name for name in cells[0] if width >= _WIDE or name in essential]
    for name in names:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=name != "arm", overflow="fold")
    for row in cells:
        table.add_row(*(row[name] for name in names))
    return table


_WIDE = 150
MOST_UNREAD = 0.03  # of the answers
MOST_CUT_OFF = 0.05  # of the answers; more is said loudly


def show_results(document: dict[str, Any]) -> None:
    """Print the table of a results document, as wide as there is room."""
    width = table_width(console())
    console(width=width).print(results_table(document, width=width))
    answers = document["num_problems"] * document.get("num_trials", 1)
    if cut := _shares_above(document["arms"], "num_truncated", answers, MOST_CUT_OFF):
        warn(f"ANSWERS CUT OFF: {cut}. What was cut off counts as wrong: raise --max-new-tokens")
    if document["graded"] and (unread := _shares_above(document["arms"], "num_unread", answers, MOST_UNREAD)):
        warn(f"ANSWERS NOT READ: {unread}. They count as wrong: check the grader and the prompt")


def _shares_above(arms: list[dict[str, Any]], count: str, num_answers: int, most: float) -> str:
    """Name the arms in which a count is more than this share of the answers, with their shares."""
    shares = {arm["spec"]: arm[count] / num_answers for arm in arms if num_answers}
    return ", ".join(f"{share:.0%} of {name}" for name, share in shares.items() if share > most)


def show_throughput(document: dict[str, Any]) -> None:
    """Print speeds under load, where they were measured."""
    if not (rows := document.get("throughput")):
        return
    from rich import box
    from rich.table import Table

    table = Table(title="under load; medians over turns", title_justify="left", box=box.SIMPLE_HEAD)
    names = ("arm", "at once", "tokens/s", "over lossless", "tokens/step", "first token, ms", "per token, ms")
    for name in names:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=name != "arm")
    for row in rows:
        ratio = "-" if row["vs_lossless"] is None else f"{row['vs_lossless']:.2f}x"
        table.add_row(
            row["arm"],
            str(row["concurrency"]),
            f"{row['tokens_per_second']:.0f}",
            f"{ratio} {_interval(row['vs_lossless_ci95'], 1, 2)}",
            f"{row['tokens_per_step']:.2f}",
            *(f"{1000 * row[name][0]:.0f} (p95 {1000 * row[name][1]:.0f})" for name in ("first_s", "per_token_s")),
        )
    console(width=table_width(console())).print(table)


def table_width(terminal: Console) -> int:
    """A terminal's own width; wide enough for every column in a file or a pipe."""
    return terminal.width if terminal.is_terminal else 200


def _row(arm: dict[str, Any]) -> dict[str, str]:
    return {
        "arm": arm["spec"],
        **_quality(arm),
        "tokens/round": _number(arm["tokens_per_round"], ".2f"),
        "accepted": _number(arm["acceptance_rate"], ".0%"),
        "rescued": str(arm["num_rescued"]),
        "speedup vs target": _speedup(arm, "speedup_vs_target"),
        "vs lossless ": _speedup(arm, "speedup_vs_lossless"),
        "tokens/answer": _number(arm["tokens_per_answer"], ".0f"),
        "answers/s vs lossless": _speedup(arm, "answers_vs_lossless"),
        "cut off": str(arm["num_truncated"]),
        "unread": "-" if arm["accuracy"] is None else str(arm["num_unread"]),
    }


def _speedup(arm: dict[str, Any], name: str) -> str:
    return "-" if arm[name] is None else f"{arm[name]:.2f}x {_interval(arm[f'{name}_ci95'], 1, 2)}"


def _quality(arm: dict[str, Any]) -> dict[str, str]:
    if arm["accuracy"] is None:
        return {"solved, %": "-", "vs lossless": "-"}
    difference = arm["accuracy_vs_lossless"]
    return {
        "solved, %": f"{100 * arm['accuracy']:.1f} {_interval(arm['accuracy_ci95'], 100, 1)}",
        "vs lossless": f"{100 * difference[0]:+.1f} {_interval(difference[1:], 100, 1)}",
    }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(bounds: list[float] | None, scale: float, digits: int) -> str:
    if bounds is None:
        return ""
    return f"[{scale * bounds[0]:.{digits}f}, {scale * bounds[1]:.{digits}f}]"
