"""Runs a module as `python -m` does; ends with all it started when its parent is gone: PARENT MODULE ARGUMENTS."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_follow, args=(int(sys.argv[1]),), daemon=True).start()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
