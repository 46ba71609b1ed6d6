"""What verbs that measure arms have in common: run them, write results and figure, print the table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import SpecError
from reprieve.evaluation.settings import RunSettings, SpeedSettings
from reprieve.servers.settings import EngineSettings
from reprieve.settings import PairSettings

if TYPE_CHECKING:
    from reprieve.evaluation.arms import Arm
    from reprieve.evaluation.engines.base import Engine
    from reprieve.evaluation.runner import Run
    from reprieve.tasks import Task


def report(run: Run, document: dict[str, Any], engine: EngineSettings, out: Path, *, num_workers: int = 1) -> int:
    """Write and show what was measured; returns the exit status."""
    from reprieve.evaluation.figure import draw_frontier
    from reprieve.evaluation.results import write_results

    write_results(document, out)
    if not document["arms"]:
        screen.warn(f"interrupted before every arm had answered a problem; records kept in {out}")
        return 130
    screen.show_results(document)
    screen.show_throughput(document)
    screen.say(f"results: {out / 'results.json'}")
    if not engine.local and "throughput" not in document:
        screen.warn("answers shared the servers' batches: `reprieve bench --concurrency` measures speed")
    if num_workers > 1:
        screen.warn(f"{num_workers} processes shared this machine: measure speeds with --workers 1")
    if not document["graded"]:
        screen.say(f"This task has no right answers; `reprieve verdicts {out}` has a judge compare the texts.")
    elif find_spec("matplotlib"):
        screen.say(f"figure: {draw_frontier(document, out)[0]}")
    else:
        screen.say("no figure, for want of matplotlib: pip install 'reprieve[evidence]'")
    if not run.complete:
        screen.warn("interrupted: the table holds what was finished; run again to resume")
        return 130
    return 1 if any(arm["num_failed"] for arm in document["arms"]) else 0


def measure(
    command: Command,
    arms: Sequence[Arm],
    settings: RunSettings,
    engine: EngineSettings,
    pair: PairSettings,
    out: Path,
    *,
    num_workers: int = 1,
    speed: SpeedSettings | None = None,
) -> tuple[Run, dict[str, Any]]:
    """A run and its results document, with speed under load where that is asked for.

    Args:
        command: whose flags are kept in the run's folder.
        num_workers: processes side by side.
        speed: how speed under load is measured too, on servers.

    Raises:
        SpecError: speed under load of an engine that is not a server.
    """
    from reprieve.evaluation.config import RunConfig
    from reprieve.evaluation.engines.base import without_missing
    from reprieve.evaluation.results import summarise
    from reprieve.evaluation.runner import run_arms

    levels = speed.concurrency if speed is not None else ()
    if levels and engine.local:
        raise SpecError("concurrency is of servers (--engine vllm): the local engine answers one request at a time")
    with screen.engine_and_task(engine, pair, settings.task, settings.prompt, num_workers=num_workers) as (made, task):
        arms = without_missing(arms, made, settings.drafter)
        config = RunConfig.of(made, arms, settings, command=screen.command_line())
        with screen.progress_bar(f"{len(arms)} arms") as bar:
            run = run_arms(
                config,
                arms,
                made,
                task,
                out,
                begun=lambda: command.keep_config(out),
                progress=screen.reporter(bar),
            )
        document = summarise(run)
        if speed is not None and levels and run.complete:
            document["throughput"] = _under_load(made, run, task, speed, out)
    return run, document


def _under_load(engine: Engine, run: Run, task: Task, speed: SpeedSettings, out: Path) -> list[dict[str, Any]]:
    """Tokens a second of a run's arms at each concurrency."""
    from reprieve.evaluation.engines.served import ServedEngine
    from reprieve.evaluation.throughput import measure_throughput

    assert isinstance(engine, ServedEngine)
    with screen.progress_bar("turns") as bar:
        progress = screen.reporter(bar, "turns")
        return measure_throughput(engine, run.config, task, run.arms, speed, out, progress=progress)
