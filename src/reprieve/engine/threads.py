"""How many threads a pair's forwards take on a CPU. Small models lose more by waiting for threads than they gain."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from reprieve.engine.pair import Pair, load_pair
from reprieve.models.int8 import num_weights
from reprieve.models.timing import forward_seconds
from reprieve.settings import PairSettings

_LARGE = 500_000_000  # parameters from which on all cores are right without a trial
_GAIN = 1.25  # how much faster they must be: a second thread is somebody else's core
_REPEATS = 7
_READ = 8  # tokens of a forward that is tried


def load_asked(
    settings: PairSettings, announce: Callable[[str], None] = lambda line: None, *, decodes: bool = True
) -> Pair:
    """The pair that settings ask for, and the threads; raises what `load_pair` does.

    Args:
        announce: called with a line where a trial chose the threads.
        decodes: whether a few tokens are read at a time; large batches take all cores unless they are told otherwise.
    """
    pair = load_pair(**settings.models)
    if pair.device.type == "cpu" and (decodes or settings.num_threads):
        chosen = settings.num_threads or _choose(pair, torch.get_num_threads())
        if settings.num_threads is None and chosen != torch.get_num_threads():
            announce(f"one thread a forward: {torch.get_num_threads()} are no faster here (--num-threads to set it)")
        torch.set_num_threads(chosen)
    return pair


def _choose(pair: Pair, all_threads: int) -> int:
    """One thread, or all where a forward of the target is clearly faster with them."""
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
