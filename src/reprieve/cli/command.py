"""Verbs: records of their flags that can be run, alone or one after another."""

from __future__ import annotations

import gc
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from reprieve.cli import screen
from reprieve.cli.flags import CONFIG, command_in, to_yaml
from reprieve.errors import ReprieveError
from reprieve.files import read_json, replace_file

INTERRUPTED = 130  # exit status


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


class Pipeline:
    """Runs verbs one after another and records them: a completed stage is skipped.

    Args:
        out: folder of the record.
        name: file name of the record, without its extension.
    """

    def __init__(self, out: Path, name: str) -> None:
        self._path = out / f"{name}.json"
        try:
            stages = read_json(self._path, "the stage record")["stages"]
            self._record = {stage["name"]: stage for stage in stages}
        except (ReprieveError, KeyError, TypeError):  # no record, or an unreadable one: every stage is run
            self._record = {}

    def run(self, name: str, command: Command, *, results: Sequence[int] = (0,)) -> int:
        """Run a stage; returns its exit status.

        Args:
            results: exit statuses that are results. Others end the pipeline.

        Raises:
            KeyboardInterrupt: the stage was interrupted; it resumes when run again.
            ReprieveError: the stage failed.
        """
        flags = to_yaml(command, command.verb)
        known = self._record.get(name, {})
        if known.get("flags") == flags and known.get("status") in results:
            screen.say(f"{name}: done before")
            return int(known["status"])
        screen.say(f"\n{name} (reprieve {command.verb})")
        started = time.monotonic()
        status = command.run()
        gc.collect()  # the models of this stage, before the next one loads its own
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        seconds = time.monotonic() - started
        self._record[name] = {"name": name, "flags": flags, "seconds": seconds, "status": status}
        replace_file(self._path, json.dumps({"stages": list(self._record.values())}, indent=2) + "\n")
        if status not in results:
            raise ReprieveError(
                f"stage {name} (reprieve {command.verb}) failed with status {status}; run again to resume"
            )
        return status
