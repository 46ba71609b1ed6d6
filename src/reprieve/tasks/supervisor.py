"""Who stands over a program in the sandbox: a process of its own, thrown away after it. Nothing of Reprieve is here.

A fork server: it imports the `sandlock` library once, and is sent sockets, one a job. For each it forks a warden, which
reads the job from the socket, forks the supervisor in which the library runs, waits for it or for the socket's other
end to close, ends whatever is left of the program, and answers. A program that got hold of its supervisor would hold a
process that knows this one job and ends with it, not the one that grades.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GRACE_S = 5.0  # that a supervisor may take longer than its program: files to move, a tree to end
_SWEEP_S = 0.5
_LONGEST_REASON = 1000  # characters
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


def stand_by(asked: socket.socket) -> None:
    """The warden's part: a supervisor for the job, its end, the end of all that it left, and the answer."""
    reads, writes = os.pipe()
    try:
        job = json.loads(_line(asked))
        _become_reaper()
        started = time.monotonic()
        supervisor = os.fork()
        if supervisor == 0:
            asked.close()
            os.close(reads)
            _be_supervisor(job, writes)
        os.close(writes)
        said = _said(reads, asked, job["seconds"] + _GRACE_S)
        _end_children()
        late = time.monotonic() - started >= job["seconds"]
        found = json.loads(said) if said else {"code": -int(signal.SIGKILL), "late": late}  # it was killed
    except Exception as error:
        found = _failure(error)
    with contextlib.suppress(OSError):
        asked.sendall(json.dumps(found).encode() + b"\n")


def _line(asked: socket.socket) -> bytes:
    """All that comes up to the end of a line."""
    with asked.makefile("rb") as file:
        return file.readline()


def _be_supervisor(job: dict[str, Any], writes: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        found = supervise(job)
    except BaseException as error:  # whatever the kernel refused
        found = _failure(error)
    with open(writes, "wb") as out:
        out.write(json.dumps(found).encode())
    os._exit(0)


def _failure(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_REASON]}


def _said(reads: int, asked: socket.socket, seconds: float) -> bytes:
    """What a supervisor says; nothing once it is late, or nobody asks any more."""
    waiting = select.poll()
    waiting.register(reads, select.POLLIN | select.POLLHUP)
    waiting.register(asked, select.POLLIN | select.POLLHUP)  # nothing more is sent: whatever comes is its end
    for number, _ in waiting.poll(1000 * seconds):
        if number == reads:
            with open(reads, "rb") as told:
                return told.read()
    return b""


def _become_reaper() -> None:
    """What loses its parents comes to this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def _end_children(spared: frozenset[int] = frozenset()) -> None:
    """Kill what came to this process when its parents ended, until there is none but those to be spared."""
    while children := set(_children()) - spared:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def main() -> None:
    """Serve jobs until there is nobody to send them."""
    sys.path[:] = json.loads(sys.argv[1])
    import sandlock  # noqa: F401  # once, for all that are forked

    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # what all that are forked inherit must not lead to who grades
        os.dup2(nothing, number)
    _become_reaper()
    wardens: set[int] = set()
    while True:
        ready = select.select([control], [], [], _SWEEP_S if wardens else None)[0]
        if ready:
            _, numbers, _, _ = socket.recv_fds(control, 1, 1)
            if not numbers:
                break  # wardens see by their own sockets that nobody asks any more
            asked = socket.socket(fileno=numbers[0])
            if (warden := os.fork()) == 0:
                control.close()
                stand_by(asked)
                os._exit(0)
            asked.close()
            wardens.add(warden)
        wardens -= {warden for warden in wardens if os.waitpid(warden, os.WNOHANG)[0]}
        _end_children(frozenset(wardens))  # of a warden that was killed
    for warden in wardens:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(warden, 0)
    _end_children()


if __name__ == "__main__":
    main()
