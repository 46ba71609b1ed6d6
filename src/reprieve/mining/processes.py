"""Mining in several processes: each mines its share of the problems, the parent writes the store."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from reprieve.engine.pair import start_worker
from reprieve.errors import ReprieveError
from reprieve.mining.recipes import build
from reprieve.mining.records import ProblemLabels
from reprieve.mining.runner import MiningReport, mine_problems
from reprieve.mining.settings import MiningSettings
from reprieve.mining.store import LabelStore


def mine_in_processes(
    settings: MiningSettings,
    folder: Path,
    *,
    num_workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MiningReport:
    """Mine in several local processes, each with its own copy of the pair and one CPU thread.

    Raises:
        ReprieveError: a worker process died; labels written so far are kept.
    """
    context = multiprocessing.get_context("spawn")
    connections, workers, total = [], [], MiningReport()
    for number in range(num_workers):
        own_end, worker_end = context.Pipe()
        workers.append(context.Process(target=_run, args=(worker_end, settings, number, num_workers), daemon=True))
        workers[-1].start()
        worker_end.close()  # so that the pipe closes when the worker exits
        connections.append(own_end)
    try:
        for connection in connections:
            store = LabelStore(folder, _receive(connection))
            connection.send(store.done())
        num_before, open_connections = len(store.done()), set(connections)
        while open_connections:
            ready = wait(list(open_connections))
            for connection in [one for one in open_connections if one in ready]:
                message = _receive(connection)
                if isinstance(message, ProblemLabels):
                    store.append(message)
                    progress(len(store.done()), settings.limit)
                else:
                    open_connections.discard(connection)
                    total.errors.update(message.errors)
        total.num_mined = len(store.done()) - num_before
    except EOFError:
        raise ReprieveError("a worker process died; labels mined so far are kept, run again to go on") from None
    except KeyboardInterrupt:
        total.interrupted = True
    finally:
        for worker in workers:
            worker.terminate()
    total.num_skipped = max(0, settings.limit - total.num_mined - len(total.errors))
    return total


def _receive(connection: Connection) -> Any:
    """Return a worker's next message: its manifest, then labels, then its report; raise the error that ended it."""
    message = connection.recv()
    if isinstance(message, Exception):
        raise message
    return message


class _ParentStore:
    """Stands for the parent's store in a worker."""

    def __init__(self, connection: Connection, done: set[str]) -> None:
        self._connection = connection
        self._done = done

    def done(self) -> set[str]:
        return self._done

    def append(self, labels: ProblemLabels) -> None:
        self._connection.send(labels)
        self._done.add(labels.problem_id)


def _run(connection: Connection, settings: MiningSettings, number: int, num_workers: int) -> None:
    """In a worker process: mine every `num_workers`th problem."""
    start_worker()
    try:
        bench = build(settings)
        connection.send(bench.manifest)
        store = _ParentStore(connection, connection.recv())
        problems = bench.problems[number::num_workers]
        connection.send(mine_problems(bench.miner, problems, store, num_in_flight=settings.in_flight))
    except Exception as error:
        known = isinstance(error, ReprieveError)
        connection.send(error if known else ReprieveError(f"{type(error).__name__}: {error}"))
