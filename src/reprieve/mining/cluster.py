"""Mining in several processes or on a Ray cluster: all workers read the same problems and write one store."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, import_extra
from reprieve.mining.recipes import build
from reprieve.mining.runner import MiningReport, mine_problems
from reprieve.mining.settings import MiningSettings
from reprieve.mining.store import LabelStore
from reprieve.models.worker_process import start_worker

_POLL_S = 0.5


def mine_in_processes(
    settings: MiningSettings,
    folder: Path,
    *,
    num_workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MiningReport:
    """Mine in processes of this machine, each with its own copy of the pair and one thread.

    Raises:
        ReprieveError: a worker died; finished labels are kept.
    """
    context = multiprocessing.get_context("spawn")
    replies, workers, total = [], [], MiningReport()
    for number in range(num_workers):
        reply, answers = context.Pipe(duplex=False)
        arguments = (answers, settings, str(folder.resolve()), number, num_workers)
        workers.append(context.Process(target=_reply, args=arguments, daemon=True))
        workers[-1].start()
        answers.close()  # so that the pipe ends with the worker
        replies.append(reply)
    try:
        pending = set(replies)
        while pending:
            answered = multiprocessing.connection.wait(list(pending), timeout=_POLL_S)
            for reply in [reply for reply in pending if reply in answered]:
                pending.discard(reply)
                made = reply.recv()
                if isinstance(made, Exception):
                    raise made
                _add(total, made)
            _tell(folder, settings, progress)
    except EOFError:
        raise ReprieveError("a worker process died; what was mined is kept, run again to go on") from None
    except KeyboardInterrupt:
        total.interrupted = True
    finally:
        for worker in workers:
            worker.terminate()
    total.num_skipped = max(0, settings.limit - total.num_mined - len(total.errors))
    return total


def _reply(answers: Any, settings: MiningSettings, folder: str, number: int, num_workers: int) -> None:
    """Mine in a worker process, and send its report or its error."""
    start_worker()
    try:
        answers.send(_work(settings, folder, number, num_workers))
    except Exception as error:
        answers.send(error if isinstance(error, ReprieveError) else ReprieveError(f"{type(error).__name__}: {error}"))


def _tell(folder: Path, settings: MiningSettings, progress: Callable[[int, int], None]) -> None:
    if (folder / "manifest.json").exists():
        progress(len(LabelStore(folder).done()), settings.limit)


def mine_on_ray(
    settings: MiningSettings,
    folder: Path,
    *,
    num_workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MiningReport:
    """Mine on the Ray cluster in RAY_ADDRESS, or on one started here.

    Workers claim problems one by one through the store, which must be in a folder that every worker sees. Fast workers
    claim more, and a worker that dies releases its problems.

    Args:
        num_workers: 0 for one per CPU of the cluster, or per GPU if the models run on one.

    Raises:
        ReprieveError: Ray is missing, or a worker could not start.
    """
    ray = import_extra("ray", "ray")
    if not ray.is_initialized():
        own = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers or None, "include_dashboard": False}
        ray.init(log_to_driver=False, **own)
    resources = ray.cluster_resources()
    on_gpu = resources.get("GPU", 0) > 0 if settings.pair.device is None else settings.pair.device.startswith("cuda")
    available = resources.get("GPU" if on_gpu else "CPU", 1)
    num_workers = num_workers or max(1, int(available))
    run = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0)(_work)
    pending = [run.remote(settings, str(folder.resolve()), number, num_workers) for number in range(num_workers)]
    total = MiningReport()
    try:
        while pending:
            finished, pending = ray.wait(pending, timeout=_POLL_S)
            for handle in finished:
                _add(total, ray.get(handle))
            _tell(folder, settings, progress)
    except KeyboardInterrupt:
        total.interrupted = True
        for handle in pending:
            ray.cancel(handle, force=True)
    except ray.exceptions.RayError as error:
        for handle in pending:
            ray.cancel(handle, force=True)
        raise ReprieveError(f"a worker failed: {' '.join(str(error).split())[-400:]}") from None
    total.num_skipped = max(0, settings.limit - total.num_mined - len(total.errors))
    return total


def _work(settings: MiningSettings, folder: str, number: int, num_workers: int) -> MiningReport:
    """Mine all problems from a worker's own starting point; skip those claimed or done by others."""
    import torch

    torch.set_num_threads(1)
    bench = build(settings)
    start = number * len(bench.problems) // num_workers
    problems = bench.problems[start:] + bench.problems[:start]
    store = LabelStore(Path(folder), bench.manifest)
    return mine_problems(bench.miner, problems, store, num_in_flight=settings.in_flight)


def _add(total: MiningReport, part: Any) -> None:
    total.num_mined += part.num_mined
    total.errors.update(part.errors)
    total.interrupted |= part.interrupted
