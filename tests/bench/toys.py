"""Helpers for tests that run benchmarks."""

from __future__ import annotations

from reprieve.backends.local import LocalEngine
from reprieve.bench.engine import RunConfig
from reprieve.bench.run import Run
from reprieve.bench.settings import RunSettings
from reprieve.tasks import TaskProblem
from tests.kit.toys import ToyTask


def settings(**changes):
    return RunSettings(**{"task": "toy", "limit": 6, **changes})


def run_arms(config, arms, engine, task, folder, **options):
    """Measure the arms of a run, and return the run."""
    run = Run(config, arms, engine, task, folder)
    run.measure(**options)
    return run


def run(pair, arms, folder, **changes):
    engine = LocalEngine(pair)
    return run_arms(RunConfig.of(engine, arms, settings(**changes)), arms, engine, ToyTask(), folder)


class TwoTurns(ToyTask):
    graded = False

    def problems(self, split, limit, *, offset=0):
        return [TaskProblem(f"c{i}", f"{i + 1} 2 3", "", ("7 8",), category="chat") for i in range(limit)]
