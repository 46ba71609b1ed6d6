"""Process that runs one program under the `sandlock` library and ends with it. This file does not import Reprieve.

The process forks the supervisor in which the library runs, waits for it, and then ends every process that the program
left. A program that took over its supervisor would control a process that knows only this program, not the grader.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CANNOT_START = 125  # exit status: no program was started
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(number: int) -> None:
    """Get a signal when the thread that started this process ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def supervise(settings: dict[str, Any], command: list[str]) -> int:
    """Run a command in the sandbox that `settings` describe; return its exit status."""
    try:
        from sandlock import Sandbox

        with Sandbox(**settings).popen(command) as running:
            status = int(running.wait().exit_code)
        return status if status >= 0 else 128 + int(signal.SIGKILL)
    except BaseException as error:  # what the kernel or the library refused
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        return CANNOT_START


def end_children() -> None:
    """Kill all children until there are none left; children of killed processes are reparented to this one."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(word) for word in file.read().split()]
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def main() -> None:
    job = json.loads(sys.argv[1])
    sys.path[:] = job["path"]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    die_with_parent(signal.SIGTERM)
    try:
        if (supervisor := os.fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL)
            os._exit(supervise(job["settings"], job["command"]))
        status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
        sys.exit(status if status >= 0 else 128 - status)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()


if __name__ == "__main__":
    main()
