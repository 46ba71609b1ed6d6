"""`reprieve publish`: a head with its certificates and report, on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import Command


@dataclass(frozen=True)
class Publish(Command):
    """Upload a head with its certificates and report to the Hugging Face Hub.

    Args:
        folder: Folder of the head, or of quickstart.
        repo: Repository, owner/name.
        report: HTML report to upload too. Default: the report.html of a quickstart folder.
        private: Make a new repository private.
        dry_run: Write the files to --out and upload nothing.
        out: Folder for the files that are uploaded.
    """

    verb = "publish"
    example = "reprieve publish heads/mine --repo you/your-head --dry-run"

    folder: Path = field(metadata={"positional": True})
    repo: str
    report: Path | None = None
    private: bool = False
    dry_run: bool = False
    out: Path = Path("runs/publish")

    def run(self) -> int:
        screen.quiet_transformers()
        from reprieve.heads.publishing import Repository

        repository = Repository.of(self.folder, self.repo, report=self.report)
        folder = repository.write(self.out)
        size = sum(map(len, repository.files.values())) / 1024
        screen.say(f"{repository.name}: {len(repository.files)} files, {size:.0f} KiB, in {folder}")
        if self.dry_run:
            screen.say("nothing was uploaded; run again without --dry-run")
        else:
            screen.say(f"  {repository.upload(folder, private=self.private)}")
        return 0
