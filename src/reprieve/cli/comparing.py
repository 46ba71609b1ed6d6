"""What verbs that measure arms have in common: run them, write results and figure, print the table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.evaluation.settings import RunSettings
from reprieve.servers.settings import EngineSettings
from reprieve.settings import PairSettings

if TYPE_CHECKING:
    from reprieve.evaluation.arms import Arm


def compare(
    command: Command,
    arms: Sequence[Arm],
    settings: RunSettings,
    engine: EngineSettings,
    pair: PairSettings,
    out: Path,
    *,
    num_workers: int = 1,
) -> int:
    """Measure and report; returns the exit status.

    Args:
        command: whose flags are kept in the run's folder.
        num_workers: processes side by side.
    """
    from reprieve.evaluation.config import RunConfig
    from reprieve.evaluation.engines.base import without_missing
    from reprieve.evaluation.figure import draw_frontier
    from reprieve.evaluation.results import summarise, write_results
    from reprieve.evaluation.runner import run_arms

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
    write_results(document, out)
    if not document["arms"]:
        screen.warn(f"interrupted before every arm had answered a problem; records kept in {out}")
        return 130
    screen.show_results(document)
    screen.say(f"results: {out / 'results.json'}")
    if not engine.local:
        screen.warn("answers shared the servers' batches: measure speeds with --concurrency")
    elif num_workers > 1:
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
