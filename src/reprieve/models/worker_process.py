"""Initialisation of worker processes."""

from __future__ import annotations

import os
import signal
import threading
import time


def start_worker() -> None:
    """Use one thread, hide progress bars, ignore Ctrl-C (the parent handles it), and exit with the parent."""
    import torch
    from transformers.utils import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def _leave_with_parent(parent: int) -> None:
    """Exit if the parent is killed: it cannot notify its workers, which would otherwise wait forever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
