"""Tables of results, as wide as the terminal, or 80 columns in a file or a pipe; `results.json` has every column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reprieve.cli.screen import MOST_CUT_OFF, console, warn

if TYPE_CHECKING:
    from rich.table import Table

    from reprieve.bench.results import ArmResults, Results, ThroughputResults

_MOST_UNREAD = 0.03  # of the answers


def results_table(results: Results, *, width: int) -> Table:
    """Return the arms of a run, one row each, with as many columns as the width allows."""
    title = (
        f"{results.config.task}, {results.config.split} split, n = {results.num_problems}; "
        f"K = {results.draft_length}; brackets are 95% intervals"
    )
    full, whole = ([_row(arm, digits=digits) for arm in results.arms] for digits in (1, 0))
    short = [{name: row[name] for name in _SHORT} for row in whole]
    return _table(title, full, short, width)


def _table(title: str, full: list[dict[str, str]], short: list[dict[str, str]], width: int) -> Table:
    """Return a table of cells by column.

    Args:
        full: rows with all columns, used if the names of arms fit on one line.
        short: rows with fewer columns, the names first. The second-to-last column is dropped until names break only at
            their separators; a caption then says so.
    """
    from rich import box
    from rich.table import Table

    rows = full
    if _room(full, width) < max(len(row["arm"]) for row in full):
        rows = short
        longest = max(len(part) for row in short for part in _parts(row["arm"]))
        while _room(rows, width) < longest and len(rows[0]) > 3:
            dropped = list(rows[0])[-2]
            rows = [{name: text for name, text in row.items() if name != dropped} for row in rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    if len(rows[0]) < len(short[0]):
        table.caption = "COLUMNS=120 shows more columns; results.json has all"
        table.caption_justify = "left"
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=name != "arm", overflow="fold")
    for row in rows:
        table.add_row(wrap_spec(row["arm"], _room(rows, width)), *(text for name, text in row.items() if name != "arm"))
    return table


def _room(rows: list[dict[str, str]], width: int) -> int:
    """Return the width in characters that the other columns of a table leave for the names of arms."""
    widths = [max(*map(len, name.split("\n")), *(len(row[name]) for row in rows)) for name in rows[0] if name != "arm"]
    return width - sum(widths) - 2 * len(widths) - 2


def wrap_spec(spec: str, width: int) -> str:
    """Break a rule's specification at its signs, into lines of at most `width` where its parts allow."""
    lines = [""]
    for part in _parts(spec):
        if len(lines[-1]) + len(part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _parts(spec: str) -> list[str]:
    return re.split(r"(?<=[,:|&])|(?=@)", spec)


def show_results(results: Results) -> None:
    """Print the table of results, as wide as there is room."""
    terminal = console()
    terminal.print(results_table(results, width=terminal.width))
    if cut := _shares_above(results, "num_truncated", MOST_CUT_OFF):
        warn(f"ANSWERS CUT OFF: {cut}. What was cut off counts as wrong: raise --max-new-tokens")
    if results.graded and (unread := _shares_above(results, "num_unread", _MOST_UNREAD)):
        warn(f"ANSWERS NOT READ: {unread}. They count as wrong: check the grader and the prompt")
    if results.graded and not any(arm.accuracy for arm in results.arms):
        warn("NOTHING SOLVED by any arm: check the prompt format (template, --chat-template) and the grader")


def _shares_above(results: Results, count: str, most: float) -> str:
    """Name the arms in which a count is more than this share of the answers, with their shares."""
    shares = {arm.spec: getattr(arm, count) / results.num_answers for arm in results.arms}
    return ", ".join(f"{share:.0%} of {name}" for name, share in shares.items() if share > most)


def show_throughput(rows: Sequence[ThroughputResults]) -> None:
    """Print speeds under load, where they were measured."""
    if not rows:
        return
    terminal = console()
    full = [_loaded_row(row) for row in rows]
    short = [{name: row[name] for name in _LOADED} for row in full]
    terminal.print(_table("under load; medians over turns", full, short, terminal.width))


_SHORT = ("arm", "solved, %", "points vs\nlossless", "tokens/\nround", "speedup vs\ntarget")  # of a narrow table
_LOADED = ("arm", "at\nonce", "tokens/s", "first token,\nms", "over lossless")  # of a narrow table


def _loaded_row(row: ThroughputResults) -> dict[str, str]:
    ratio = "-" if row.vs_lossless is None else f"{row.vs_lossless:.2f}x"
    times = [f"{1000 * p50:.0f} (p95 {1000 * p95:.0f})" for p50, p95 in (row.first_s, row.per_token_s)]
    return {
        "arm": row.arm,
        "at\nonce": str(row.concurrency),
        "tokens/s": f"{row.tokens_per_second:.0f}",
        "over lossless": f"{ratio} {_interval(row.vs_lossless_ci95, 1, 2)}",
        "tokens/\nstep": f"{row.tokens_per_step:.2f}",
        "first token,\nms": times[0],
        "per token,\nms": times[1],
    }


def _row(arm: ArmResults, *, digits: int) -> dict[str, str]:
    """The cells of an arm; `digits` of the intervals of shares."""
    return {
        "arm": arm.spec,
        **_quality(arm, digits=digits),
        "tokens/\nround": _number(arm.tokens_per_round, ".2f"),
        "accepted": _number(arm.acceptance_rate, ".0%"),
        "rescued": str(arm.num_rescued),
        "speedup vs\ntarget": _speedup(arm, "speedup_vs_target"),
        "speedup vs\nlossless": _speedup(arm, "speedup_vs_lossless"),
        "tokens/\nanswer": _number(arm.tokens_per_answer, ".0f"),
        "rounds/\nanswer": _number(arm.rounds_per_answer, ".1f"),
        "answers/s vs\nlossless": _speedup(arm, "answers_vs_lossless"),
        "cut off": str(arm.num_truncated),
        "unread": "-" if arm.accuracy is None else str(arm.num_unread),
    }


def _speedup(arm: ArmResults, name: str) -> str:
    ratio = getattr(arm, name)
    return "-" if ratio is None else f"{ratio:.2f}x {_interval(getattr(arm, f'{name}_ci95'), 1, 2)}"


def _quality(arm: ArmResults, *, digits: int) -> dict[str, str]:
    if arm.accuracy is None or (difference := arm.accuracy_vs_lossless) is None:
        return {"solved, %": "-", "points vs\nlossless": "-"}
    return {
        "solved, %": f"{100 * arm.accuracy:.1f} {_interval(arm.accuracy_ci95, 100, digits)}",
        "points vs\nlossless": f"{100 * difference[0]:+.1f} {_interval(difference[1:], 100, digits)}",
    }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(bounds: list[float] | None, scale: float, digits: int) -> str:
    if bounds is None:
        return ""
    return f"[{scale * bounds[0]:.{digits}f}, {scale * bounds[1]:.{digits}f}]"
