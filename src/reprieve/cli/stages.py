"""Long work in stages: each is a command that a user could type, resumes by itself, and logs to a file of its name."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.backends.settings import EngineSettings
from reprieve.cli import screen
from reprieve.errors import ReprieveError
from reprieve.files import read_json, replace_file
from reprieve.settings import PairSettings, PromptSettings


@dataclass
class Stage:
    """One command.

    Args:
        passes: exit statuses that are results, not failures.
    """

    name: str
    arguments: list[str]
    passes: tuple[int, ...] = (0,)
    seconds: float = 0.0
    status: int | None = None
    process: Any = field(default=None, repr=False)

    @property
    def command(self) -> str:
        return shlex.join(["reprieve", *self.arguments])

    def log(self, out: Path) -> Path:
        """The file with all it said."""
        return out / f"{self.name.replace(' ', '-')}.log"

    @property
    def account(self) -> dict[str, Any]:
        return {"name": self.name, "command": self.command, "seconds": self.seconds, "status": self.status}


class StageFailed(Exception):
    """A stage ended badly."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.name)
        self.stage = stage


class Stages:
    """Runs stages and keeps an account of them in a JSON file.

    Args:
        out: folder of the account and of what the stages say.
        name: of the account, without its ending.
        skip_done: pass over a stage that the account has with the same command and a good end.
    """

    def __init__(self, out: Path, name: str, *, skip_done: bool = False) -> None:
        self.out = out
        self._path = out / f"{name}.json"
        self._stages: list[Stage] = []
        self._account = _read_account(self._path) if skip_done else {}
        self._skip_done = skip_done

    def start(self, stage: Stage) -> None:
        """Start a stage."""
        self._stages.append(stage)
        self.out.mkdir(parents=True, exist_ok=True)
        screen.say(f"{stage.name}: {stage.command}")
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        command = [sys.executable, "-m", "reprieve.cli.main", *stage.arguments]
        stage.seconds = -time.monotonic()
        with stage.log(self.out).open("wb") as log:
            stage.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def run(self, stage: Stage) -> int:
        """Run a stage to its end, from where it was started; returns its exit status. Ctrl-C ends all that run.

        Raises:
            StageFailed: it ended badly.
        """
        known = self._account.get(stage.name)
        if (
            self._skip_done
            and stage.process is None
            and known
            and known["command"] == stage.command
            and known["status"] == 0
        ):
            screen.say(f"{stage.name}: done before")
            return 0
        if stage.process is None:
            self.start(stage)
        try:
            stage.status = stage.process.wait()
        except KeyboardInterrupt:
            self.stop()
            raise
        stage.seconds += time.monotonic()
        self._account[stage.name] = stage.account
        replace_file(self._path, json.dumps({"stages": list(self._account.values())}, indent=2) + "\n")
        screen.say(f"{stage.name}: {stage.seconds:.0f} s, exit status {stage.status}")
        if stage.status not in stage.passes:
            raise StageFailed(stage)
        return int(stage.status)

    def tell(self, failure: StageFailed) -> int:
        """Say which stage ended badly, end the others; returns the exit status of it all."""
        self.stop()
        failed = failure.stage
        screen.warn(f"{failed.name} ended with status {failed.status}; see {failed.log(self.out)}; run again to go on")
        return 130 if failed.status in (130, -2) else 1

    def stop(self) -> None:
        """End what still runs."""
        for stage in self._stages:
            if stage.process is not None and stage.process.poll() is None:
                stage.process.terminate()


def _read_account(path: Path) -> dict[str, dict[str, Any]]:
    """What an earlier run says of its stages, by name."""
    try:
        return {stage["name"]: stage for stage in read_json(path, "the account")["stages"]}
    except (ReprieveError, KeyError, TypeError):
        return {}


def prompt_flags(prompt: PromptSettings) -> list[str]:
    """A prompt format as flags."""
    length = None if prompt.max_new_tokens is None else str(prompt.max_new_tokens)
    given = {"--system-prompt": prompt.system_prompt, "--thinking": prompt.thinking, "--max-new-tokens": length}
    return (["--chat-template"] if prompt.chat_template else []) + _flags(given)


def pair_flags(pair: PairSettings) -> list[str]:
    """A pair as flags."""
    given = {"--target": pair.target, "--draft": pair.draft, "--dtype": pair.dtype, "--device": pair.device}
    threads = None if pair.num_threads is None else str(pair.num_threads)
    return _flags({**given, "--device-map": pair.device_map, "--num-threads": threads})


def engine_flags(engine: EngineSettings) -> list[str]:
    """An engine as flags; none for the local one, which every verb takes by itself."""
    return [] if engine.local else ["--engine", engine.engine]


def _flags(given: Mapping[str, str | None]) -> list[str]:
    """Those that have a value."""
    return [part for flag, value in given.items() if value is not None for part in (flag, value)]
