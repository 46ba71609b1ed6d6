"""What `bench`, `sweep` and `demo` have in common: run the arms, write results and figure, print the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reprieve.cli.options import (
    command_line,
    console,
    load_pair_and_task,
    progress_bar,
    reporter,
    results_table,
    table_width,
)
from reprieve.evaluation.arms import Arm, without_missing_draft


def compare(
    arms: Sequence[Arm],
    *,
    target: str,
    draft: str | None,
    drafter: str,
    dtype: str,
    device: str | None,
    task: str,
    split: str,
    limit: int,
    seed: int,
    sampling: dict[str, Any],
    out: Path,
    offset: int = 0,
    trials: int = 1,
    chat_template: bool = False,
) -> int:
    """Measure and report; returns the exit status."""
    from reprieve.evaluation.config import RunConfig
    from reprieve.evaluation.figure import draw_frontier
    from reprieve.evaluation.results import summarise, write_results
    from reprieve.evaluation.runner import run_arms

    pair, loaded_task = load_pair_and_task(target, draft, dtype, device, task)
    arms = without_missing_draft(arms, pair)
    config = RunConfig.of(
        pair,
        arms,
        command=command_line(),
        drafter=drafter,
        task=task,
        split=split,
        limit=limit,
        offset=offset,
        num_trials=trials,
        seed=seed,
        sampling=sampling,
        chat_template=chat_template,
    )
    with progress_bar(f"{len(arms)} arms") as bar:
        run = run_arms(config, arms, pair, loaded_task, out, progress=reporter(bar))
    document = summarise(run)
    write_results(document, out)
    if not document["arms"]:
        console(stderr=True).print(f"interrupted before every arm had answered a problem; records kept in {out}")
        return 130
    figures = draw_frontier(document, out) if document["graded"] else []
    width = table_width(console())
    console(width=width).print(results_table(document, width=width))
    told = f"figure: {figures[0]}" if figures else f"no right answers here: reprieve judge {out} compares the texts"
    console().print(f"results: {out / 'results.json'}   {told}", soft_wrap=True)
    if not run.complete:
        console(stderr=True).print("interrupted: the table holds what was finished; run again to resume")
        return 130
    return 1 if any(arm["num_failed"] for arm in document["arms"]) else 0
