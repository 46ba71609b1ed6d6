"""`reprieve report`: one page from runs and certificates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import Command


@dataclass(frozen=True)
class Report(Command):
    """Write one self-contained HTML page: frontier, table, certificates, examples, commands.

    Args:
        folders: Result folders of bench or certify.
        title: Title of the page.
        out: The HTML file.
    """

    verb = "report"
    example = "reprieve report runs/bench --out report.html"

    folders: tuple[Path, ...] = field(metadata={"positional": True})
    title: str = ""
    out: Path = Path("report.html")

    def run(self) -> int:
        from reprieve.bench.report import write_report

        path = write_report(self.folders, self.out, title=self.title)
        screen.say(f"report: {path} ({path.stat().st_size / 1024:.0f} KiB, opens in any browser)")
        return 0
