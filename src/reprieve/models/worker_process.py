"""What every process of a pool does first."""

from __future__ import annotations

import os
import signal
import threading
import time


def start_worker() -> None:
    """One thread, no bars; Ctrl-C is the parent's business, and without its parent a worker ends."""
    import torch
    from transformers.utils import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def _leave_with_parent(parent: int) -> None:
    """A parent that is killed cannot tell its workers; they would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
