"""The base of every verb: a record of its flags that can be run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from reprieve.cli.flags import CONFIG, command_in, to_yaml
from reprieve.errors import ReprieveError
from reprieve.files import replace_file


@dataclass(frozen=True)
class Command(ABC):
    """A verb with its flags. Its docstring is its help."""

    verb: ClassVar[str]  # as it is typed, `train judge`
    example: ClassVar[str] = ""  # a command line, which help begins with

    @abstractmethod
    def run(self) -> int:
        """Run the command; returns the exit status."""

    @property
    def kept_in(self) -> Path | None:
        """Folder of a run that can be resumed; None before the run has begun, and for commands that keep no run."""
        folder = getattr(self, "out", None)
        return folder if isinstance(folder, Path) and (folder / CONFIG).is_file() else None

    def require_own_folder(self) -> None:
        """Refuse a folder that holds a run of another command, before any work.

        Raises:
            ReprieveError: names both commands.
        """
        if (folder := self.kept_in) is not None and (made_by := command_in(folder / CONFIG)) not in (None, self.verb):
            raise ReprieveError(f"--out {str(folder)!r} holds a run of `reprieve {made_by}`; name another folder")

    def keep_config(self, folder: Path) -> None:
        """Write the flags that are in force into the run's folder: `--config` with that file repeats the run."""
        replace_file(folder / CONFIG, to_yaml(self, self.verb))
