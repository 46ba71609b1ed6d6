"""What the papers' benchmarks share: arms over a bundled pair's test split, resumable, with a line now and then."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reprieve.bundles import bundle_of
from reprieve.engine import Pair
from reprieve.evaluation.arms import Arm
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.engines.local import LocalEngine
from reprieve.evaluation.runner import Run, Runner, environment
from reprieve.evaluation.settings import RunSettings
from reprieve.settings import SamplingSettings
from reprieve.tasks import load_task


def answer_test_problems(
    pair: Pair,
    arms: Sequence[Arm],
    folder: Path,
    options: argparse.Namespace,
    *,
    drafter: str,
    temperature: float,
    draft_temperature: float | None = None,
    num_trials: int = 1,
) -> Run:
    """Answer the first `options.limit` test problems with every arm, in `options.workers` processes."""
    bundle = bundle_of(pair.target_name)
    assert bundle is not None
    settings = RunSettings(
        task=bundle.task,
        limit=options.limit,
        drafter=drafter,
        num_trials=num_trials,
        sampling=SamplingSettings(temperature, draft_temperature=draft_temperature),
    )
    engine = LocalEngine(pair, num_workers=options.workers)
    config = RunConfig.of(engine, arms, settings, command=" ".join(sys.argv))
    runner = Runner(config, arms, engine, load_task(bundle.task), folder)

    def report(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"{folder.name}: {done} of {total}", flush=True)

    complete = runner.measure(progress=report)
    return Run(config, list(arms), runner.records, environment(), complete, graded=True)
