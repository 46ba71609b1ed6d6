"""Who stands over a program in the sandbox: a process of its own, thrown away after it. Nothing of Reprieve is here.

A fork server: it imports the `sandlock` library once. For each job, a line of JSON on its input, it forks a warden;
that forks the supervisor, in which the library runs, waits for it, ends whatever is left of the program, and writes a
line of what came of it. A program that got hold of its supervisor would hold a process that knows one program and its
folder and ends with it, not the one that grades.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GRACE_S = 5.0  # that a supervisor may take longer than its program: a file system to move, a tree to end
_LONGEST_REASON = 1000  # characters; a line must go through a pipe in one piece
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def supervise(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job's command in the sandbox that it describes."""
    from sandlock import BranchAction, Sandbox, StdioMode

    seconds, given = job["seconds"], job["input"]
    process = Sandbox(**job["settings"], on_exit=BranchAction.COMMIT, on_error=BranchAction.COMMIT)
    started = time.monotonic()
    if given is None:
        result = process.run(job["command"], timeout=seconds)
    else:
        null = StdioMode.NULL
        running = process.popen(job["command"], stdin=StdioMode.PIPED, stdout=null, stderr=null)
        with running:
            feed(running.stdin, given.encode(), seconds)
            result = running.wait(timeout=max(0.01, started + seconds - time.monotonic()))
    return {"code": int(result.exit_code), "late": time.monotonic() - started >= seconds}


def feed(pipe: Any, content: bytes, seconds: float) -> None:
    """Write into a process, which may not read; to be done before it is waited for, since waiting closes the pipe."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            pipe.write(content)
            pipe.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(seconds)


def stand_by(job: dict[str, Any]) -> dict[str, Any]:
    """The warden's part: a supervisor for the job, its end, and the end of all that it left."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reads, writes = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.close(reads)
        _forget_pipes()
        try:
            found = supervise(job)
        except BaseException as error:  # whatever the kernel refused
            found = {"error": f"{type(error).__name__}: {error}"[:_LONGEST_REASON]}
        with open(writes, "wb") as out:
            out.write(json.dumps(found).encode())
        os._exit(0)
    os.close(writes)
    late = threading.Timer(job["seconds"] + _GRACE_S, os.kill, (supervisor, signal.SIGKILL))
    late.daemon = True
    late.start()
    with open(reads, "rb") as told:
        said = told.read()
    os.waitpid(supervisor, 0)
    late.cancel()
    _end_children()
    try:
        found = json.loads(said)
    except ValueError:
        found = {"code": -int(signal.SIGKILL), "late": True}  # it was ended, or ended itself
    return {**found, "id": job["id"]}


def _forget_pipes() -> None:
    """Nothing to read, nothing to write: what a program inherits must not lead to who grades."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


def _end_children() -> None:
    """Kill what came to this process when its parents ended, until there is none."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> None:
    """Serve jobs until there is nobody to send them."""
    import sandlock  # noqa: F401  # once, for all that are forked

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens end by themselves
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            found = stand_by(json.loads(line))
            os.write(1, json.dumps(found).encode() + b"\n")
            os._exit(0)
    os.killpg(0, signal.SIGKILL)  # who asked is gone: so is the use of what still runs


if __name__ == "__main__":
    main()
