"""Pipelines of stages: each is a verb with its flags, run in this process; completed stages are skipped."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.cli.flags import to_yaml
from reprieve.errors import ReprieveError
from reprieve.files import read_json, replace_file

INTERRUPTED = 130


class Pipeline:
    """Runs verbs one after another and records them: a completed stage is skipped.

    Args:
        out: folder of the record.
        name: file name of the record, without its extension.
    """

    def __init__(self, out: Path, name: str) -> None:
        self._path = out / f"{name}.json"
        self._account = _read_account(self._path)

    def run(self, name: str, command: Command, *, results: Sequence[int] = (0,)) -> int:
        """Run a stage; returns its exit status.

        Args:
            results: exit statuses that are results. Others end the pipeline.

        Raises:
            KeyboardInterrupt: the stage was interrupted; it resumes when run again.
            ReprieveError: the stage failed.
        """
        flags = to_yaml(command, command.verb)
        known = self._account.get(name, {})
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
        self._account[name] = {"name": name, "flags": flags, "seconds": seconds, "status": status}
        replace_file(self._path, json.dumps({"stages": list(self._account.values())}, indent=2) + "\n")
        if status not in results:
            raise ReprieveError(
                f"stage {name} (reprieve {command.verb}) failed with status {status}; run again to go on"
            )
        return status


def _read_account(path: Path) -> dict[str, dict[str, Any]]:
    """Return the stages of an earlier run by name; empty if there is no record."""
    try:
        return {stage["name"]: stage for stage in read_json(path, "the account")["stages"]}
    except (ReprieveError, KeyError, TypeError):
        return {}
