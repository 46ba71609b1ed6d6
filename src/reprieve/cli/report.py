"""`reprieve report`: one page from runs and certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reprieve.cli import options as o


def command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of bench, sweep, tune, eval or certify.")],
    title: Annotated[str, typer.Option(help="Of the page.")] = "",
    examples: Annotated[int, typer.Option(help="Answers shown side by side, of each run.")] = 4,
    out: Annotated[Path, typer.Option("--out", help="The HTML file.")] = Path("report.html"),
) -> int:
    """Write one self-contained HTML page: frontier, table, certificates, examples, commands."""
    from reprieve.evaluation.report import write_report

    path = write_report(runs, out, title=title, num_examples=examples)
    o.console().print(f"report: {path} ({path.stat().st_size / 1024:.0f} KiB, opens in any browser)", soft_wrap=True)
    return 0
