"""The grading process's end of the supervisors: jobs go out, what came of them comes back."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_ENDED = {"code": -int(signal.SIGKILL), "late": False}


class ForkServer:
    """A process that forks supervisors; begun at the first job, and again if it should end. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a forked process has servers of its own

    def run(self, settings: dict[str, Any], command: list[str], content: bytes | None, seconds: float) -> Any:
        """One program in a sandbox with a supervisor of its own.

        Args:
            settings: of `sandlock.Sandbox`, plain values.
            command: what runs inside.
            content: its standard input, UTF-8; None for none.
            seconds: until it is ended.

        Returns:
            `code`, the exit status, and whether it was `late`.

        Raises:
            OSError: the sandbox could not be begun.
        """
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            process = self._begun()
            number = next(self._ids)
            self._waiting[number] = answer
            text = None if content is None else content.decode()
            job = {"id": number, "settings": settings, "command": command, "input": text, "seconds": seconds}
            assert process.stdin is not None
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        found = answer.get()
        if "error" in found:
            raise OSError(found["error"])
        return found

    def close(self) -> None:
        """End it, and what it runs."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _begun(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._waiting, self._owner = {}, os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR.read_text(encoding="utf-8")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for us
        )
        threading.Thread(target=self._listen, args=(self._process, self._waiting), daemon=True).start()
        return self._process

    @staticmethod
    def _listen(process: subprocess.Popen[bytes], waiting: dict[int, queue.SimpleQueue[dict[str, Any]]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            waiting.pop(found["id"]).put(found)
        for answer in list(waiting.values()):  # it was killed
            answer.put(_ENDED)


fork_server = ForkServer()
atexit.register(fork_server.close)
