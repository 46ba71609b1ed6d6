"""`reprieve judge`: a language model compares a run's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from reprieve.cli import options as o
from reprieve.errors import ReprieveError


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a run of bench or sweep.")],
    judge: Annotated[str, typer.Option(help="openai:model=NAME,url=ADDRESS; the key comes from OPENAI_API_KEY.")],
    baseline: Annotated[str, typer.Option(help="Arm that the others are compared with.")] = "lossless",
    votes: Annotated[int, typer.Option(help="Votes on each answer; each is asked in both orders.")] = 1,
    grade: Annotated[bool, typer.Option("--grade", help="Grade each answer from 1 to 10 instead (MT-Bench).")] = False,
    in_flight: Annotated[int, typer.Option(help="Questions to the judge at once.")] = 8,
) -> int:
    """Compare every arm's answers with the baseline's, by a judge behind an OpenAI-compatible API; resumes."""
    from reprieve.evaluation.judging import judge_run
    from reprieve.evaluation.records import read_run
    from reprieve.labelling.recipes import make_chat
    from reprieve.tasks import load_task

    chat = make_chat(judge)
    config = read_run(run)
    if missing := {"task", "split", "limit"} - config.keys():
        raise ReprieveError(f"{str(run)!r} holds no run of a task: {', '.join(sorted(missing))} is missing")
    problems = load_task(config["task"]).problems(config["split"], config["limit"], offset=config.get("offset", 0))
    with o.progress_bar("answers") as bar:
        document = judge_run(
            run, problems, chat, baseline=baseline, num_votes=votes, grade=grade, num_in_flight=in_flight,
            progress=o.reporter(bar),
        )  # fmt: skip
    for arm in document["arms"]:
        o.console().print(f"{arm['arm']}: {_told(arm)}", soft_wrap=True, markup=False)
    o.console().print(f"verdicts: {run / 'verdicts.jsonl'}", soft_wrap=True)
    return 0


def _told(arm: dict[str, Any]) -> str:
    if not arm["num_judged"]:
        return "the judge gave no verdict"
    if "mean_grade" in arm:
        low, high = arm["mean_grade_ci95"]
        return f"mean grade {arm['mean_grade']:.2f} [{low:.2f}, {high:.2f}], n = {arm['num_judged']}"
    low, high = arm["equal_or_better_ci95"]
    return (
        f"equal or better in {100 * arm['equal_or_better']:.1f}% [{100 * low:.1f}, {100 * high:.1f}] "
        f"(won {arm['num_wins']}, tied {arm['num_ties']}, lost {arm['num_losses']})"
    )
