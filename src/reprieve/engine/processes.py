"""CPU threads of a pair's forwards, and set-up of worker processes.

Additional threads cost small models more in synchronisation than they gain.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable

import torch
from transformers.utils import logging

from reprieve.engine.pair import Pair, load_pair
from reprieve.models.cached_model import forward_seconds
from reprieve.models.int8 import num_weights
from reprieve.settings import PairSettings

_LARGE = 500_000_000  # parameters; larger models use all cores without a trial
_GAIN = 1.25  # required speedup, because a second thread occupies another core
_REPEATS = 7
_READ = 8  # tokens of a trial forward


def load_configured(
    settings: PairSettings, announce: Callable[[str], None] = lambda line: None, *, decodes: bool = True
) -> Pair:
    """Load the pair named by settings and set the threads; raises the errors of `load_pair`.

    Args:
        announce: called with a line if a trial chose the threads.
        decodes: True if forwards read a few tokens; large batches use all cores unless the settings name a number.
    """
    pair = load_pair(**settings.models)
    if pair.device.type == "cpu" and (decodes or settings.num_threads):
        chosen = settings.num_threads or _choose(pair, torch.get_num_threads())
        if settings.num_threads is None and chosen != torch.get_num_threads():
            announce(f"using 1 thread: {torch.get_num_threads()} are no faster here (--num-threads overrides)")
        torch.set_num_threads(chosen)
    return pair


def _choose(pair: Pair, all_threads: int) -> int:
    """Return 1, or `all_threads` if a forward of the target is clearly faster with them."""
    if all_threads == 1 or num_weights(pair.target) > _LARGE:
        return all_threads
    times: dict[int, list[float]] = {1: [], all_threads: []}
    model = pair.cached_target()
    try:
        for _ in range(_REPEATS):
            for num_threads, measured in times.items():
                torch.set_num_threads(num_threads)
                measured.append(forward_seconds(model, _READ))
    finally:
        torch.set_num_threads(all_threads)
    return all_threads if statistics.median(times[1]) > _GAIN * statistics.median(times[all_threads]) else 1


def start_worker() -> None:
    """Prepare a worker process: one thread, no progress bars, Ctrl-C left to the parent, exit with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def _leave_with_parent(parent: int) -> None:
    """Exit if the parent is killed: it cannot notify its workers, which would otherwise wait forever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
