"""Run a module like `python -m`; kill it and its process group once its parent has ended: PARENT MODULE ARGUMENTS.

A separate process watches both. If only the module were killed (Ray does so, the kernel may), the processes that it
started would run forever.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import signal
import sys
import time


def watch_from_outside(parent: int) -> None:
    """Have this process's group killed once this process or its parent has ended; call it as the group's leader."""
    leader = os.getpid()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    if os.fork() == 0:  # orphaned, so that killing a process tree does not kill the watcher
        os.setsid()
        _wait_for_either(parent, leader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    os._exit(0)


def _wait_for_either(*processes: int) -> None:
    """Until one of them has ended."""
    try:
        if hasattr(os, "pidfd_open"):
            select.select([os.pidfd_open(process) for process in processes], [], [])
            return
        while True:  # not Linux
            for process in processes:
                os.kill(process, 0)
            time.sleep(1)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    watch_from_outside(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
