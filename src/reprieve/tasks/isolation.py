"""The grading process's end of the supervisors: jobs go out, what came of them comes back."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_PATIENCE_S = 60.0  # beyond a job's own time: then its warden is not well
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")  # a supervisor has no use for more, keys least of all


class ForkServer:
    """A process that forks supervisors; begun at the first job, and again if it should end. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        os.register_at_fork(after_in_child=self._forget)

    def run(
        self, settings: dict[str, Any], command: list[str], content: bytes | None, seconds: float
    ) -> dict[str, Any]:
        """One program in a sandbox with a supervisor of its own, begun again once if that is killed.

        Args:
            settings: of `sandlock.Sandbox`, plain values.
            command: what runs inside.
            content: its standard input, UTF-8; None for none.
            seconds: until it is ended.

        Returns:
            `code`, the exit status, and whether it was `late`.

        Raises:
            OSError: the sandbox could not be begun.
            ReprieveError: its warden was killed, twice.
        """
        text = None if content is None else content.decode()
        job = {"settings": settings, "command": command, "input": text, "seconds": seconds}
        for _ in range(2):
            line = self._ask(json.dumps(job).encode() + b"\n", seconds + _PATIENCE_S)
            if line:
                found: dict[str, Any] = json.loads(line)
                if "error" in found:
                    raise OSError(found["error"])
                return found
        raise ReprieveError("a program could not be run: who stands over it was killed, twice (is memory short?)")

    def close(self) -> None:
        """End it; what it runs ends with the jobs' own sockets."""
        process, control = self._process, self._control
        self._process = self._control = None
        if process is not None and control is not None:
            control.close()
            process.terminate()
            process.wait()

    def _ask(self, job: bytes, patience_s: float) -> bytes:
        """The answer, or nothing where nobody lives to give one. Left early, the program is ended."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(patience_s)
            try:
                with theirs, self._lock:
                    socket.send_fds(self._begun(), [b"j"], [theirs.fileno()])
                ours.sendall(job)
                with ours.makefile("rb") as file:
                    return file.readline()
            except OSError:
                return b""

    def _begun(self) -> socket.socket:
        if self._process is None:
            atexit.register(self.close)
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            path = json.dumps([entry for entry in sys.path if entry])  # without the current folder
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _SUPERVISOR.read_text(encoding="utf-8"), path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C is for us
            )
        return self._control

    def _forget(self) -> None:
        """In a forked process: it has a server of its own."""
        if self._control is not None:
            self._control.close()
        self._lock = threading.Lock()
        self._process = self._control = None


fork_server = ForkServer()
