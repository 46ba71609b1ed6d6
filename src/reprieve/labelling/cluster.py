"""The same miner over a cluster, by Ray: every worker reads the same problems and writes the same store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, import_extra
from reprieve.labelling.recipes import build
from reprieve.labelling.runner import MiningReport, mine_problems
from reprieve.labelling.settings import MiningSettings
from reprieve.labelling.store import LabelStore

_POLL_S = 0.5


def mine_on_ray(
    settings: MiningSettings,
    folder: Path,
    *,
    num_workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MiningReport:
    """Mine on the cluster Ray is connected to (RAY_ADDRESS), or on one started here.

    Problems are claimed one by one through the store, which must lie where every worker sees it; so fast workers take
    more, and a worker that dies gives back what it had in hand.

    Args:
        num_workers: None for one a CPU of the cluster, or a GPU where the models run on one.

    Raises:
        ReprieveError: Ray is missing, or a worker could not start.
    """
    ray = import_extra("ray", "ray")
    if not ray.is_initialized():
        own = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers, "include_dashboard": False}
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
            if (folder / "manifest.json").exists():
                progress(len(LabelStore(folder).done()), settings.limit)
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
    """One worker: all problems, beginning at a place of its own; what others have or had is passed over."""
    import torch

    torch.set_num_threads(1)
    bench = build(settings)
    start = number * len(bench.problems) // num_workers
    problems = bench.problems[start:] + bench.problems[:start]
    store = LabelStore(Path(folder), bench.manifest)
    return mine_problems(bench.miner, problems, store, num_in_flight=settings.num_in_flight)


def _add(total: MiningReport, part: Any) -> None:
    total.num_mined += part.num_mined
    total.errors.update(part.errors)
    total.interrupted |= part.interrupted
