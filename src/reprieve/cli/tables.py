"""Tables of results for a terminal of 80 columns; `results.json` has every column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reprieve.cli.screen import MOST_CUT_OFF, console, warn

if TYPE_CHECKING:
    from rich.table import Table

_MOST_UNREAD = 0.03  # of the answers


def results_table(document: dict[str, Any]) -> Table:
    """Return the arms of a results document, one row each."""
    title = (
        f"{document['task']}, {document['split']} split, n = {document['num_problems']}; "
        f"K = {document['num_draft_tokens']}; brackets are 95% intervals"
    )
    return _table(title, [_row(arm) for arm in document["arms"]])


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    """Return a table of cells by column. The names of arms are folded where the terminal is narrow."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "arm" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def show_results(document: dict[str, Any]) -> None:
    """Print the table of a results document, as wide as there is room."""
    console().print(results_table(document))
    answers = document["num_problems"] * document.get("num_trials", 1)
    if cut := _shares_above(document["arms"], "num_truncated", answers, MOST_CUT_OFF):
        warn(f"ANSWERS CUT OFF: {cut}. What was cut off counts as wrong: raise --max-new-tokens")
    if document["graded"] and (unread := _shares_above(document["arms"], "num_unread", answers, _MOST_UNREAD)):
        warn(f"ANSWERS NOT READ: {unread}. They count as wrong: check the grader and the prompt")
    if document["graded"] and not any(arm["accuracy"] for arm in document["arms"]):
        warn("NOTHING SOLVED by any arm: check the prompt format (template, --chat-template) and the grader")


def _shares_above(arms: list[dict[str, Any]], count: str, num_answers: int, most: float) -> str:
    """Name the arms in which a count is more than this share of the answers, with their shares."""
    shares = {arm["spec"]: arm[count] / num_answers for arm in arms if num_answers}
    return ", ".join(f"{share:.0%} of {name}" for name, share in shares.items() if share > most)


def show_throughput(document: dict[str, Any]) -> None:
    """Print speeds under load, where they were measured."""
    if rows := document.get("throughput"):
        console().print(_table("under load; medians over turns", [_loaded_row(row) for row in rows]))


def _loaded_row(row: dict[str, Any]) -> dict[str, str]:
    ratio = "-" if row["vs_lossless"] is None else f"{row['vs_lossless']:.2f}x"
    times = [f"{1000 * row[name][0]:.0f} (p95 {1000 * row[name][1]:.0f})" for name in ("first_s", "per_token_s")]
    return {
        "arm": row["arm"],
        "at\nonce": str(row["concurrency"]),
        "tokens/s": f"{row['tokens_per_second']:.0f}",
        "over lossless": f"{ratio} {_interval(row['vs_lossless_ci95'], 1, 2)}",
        "first token,\nms": times[0],
        "per token,\nms": times[1],
    }


def _row(arm: dict[str, Any]) -> dict[str, str]:
    tokens = arm["tokens_per_round"]
    return {
        "arm": arm["spec"],
        **_quality(arm),
        "tokens/\nround": "-" if tokens is None else f"{tokens:.2f}",
        "speedup\nvs target": _speedup(arm),
    }


def _speedup(arm: dict[str, Any]) -> str:
    speedup = arm["speedup_vs_target"]
    return "-" if speedup is None else f"{speedup:.2f}x {_interval(arm['speedup_vs_target_ci95'], 1, 2)}"


def _quality(arm: dict[str, Any]) -> dict[str, str]:
    """Accuracy and its difference from lossless; intervals in whole points."""
    solved, points = "-", "-"
    if arm["accuracy"] is not None:
        difference = arm["accuracy_vs_lossless"]
        solved = f"{100 * arm['accuracy']:.1f} {_interval(arm['accuracy_ci95'], 100, 0)}"
        points = f"{100 * difference[0]:+.1f} {_interval(difference[1:], 100, 0)}"
    return {"solved, %": solved, "points vs\nlossless": points}


def _interval(bounds: list[float] | None, scale: float, digits: int) -> str:
    if bounds is None:
        return ""
    return f"[{scale * bounds[0]:.{digits}f}, {scale * bounds[1]:.{digits}f}]"
