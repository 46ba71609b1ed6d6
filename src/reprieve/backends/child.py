"""Runs a module as `python -m` does; ends with all it started when its parent is gone: PARENT MODULE ARGUMENTS.

A process of its own watches both: who kills the module alone (Ray does, the kernel may) leaves what it started, which
would go on for ever.
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
    if os.fork() == 0:  # nobody's child any more, so that nobody ends it with a family
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
