"""`reprieve verdicts`: a language model compares a run's answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import ReprieveError


@dataclass(frozen=True)
class Verdicts(Command):
    """Compare every arm's answers with the baseline's, by a judge behind an OpenAI-compatible API; resumes.

    Args:
        folder: Folder of a run of bench or sweep.
        judge: openai:model=NAME,url=ADDRESS; the key comes from OPENAI_API_KEY.
        baseline: Arm that the others are compared with.
        num_votes: Votes on each answer; each is asked in both orders.
        grade: Grade each answer from 1 to 10 instead (MT-Bench).
        num_in_flight: Questions to the judge at once.
    """

    verb = "verdicts"

    folder: Path = field(metadata={"positional": True})
    judge: str
    baseline: str = "lossless"
    num_votes: int = 1
    grade: bool = False
    num_in_flight: int = 8

    def run(self) -> int:
        from reprieve.evaluation.judging import judge_run
        from reprieve.evaluation.records import read_run
        from reprieve.labelling.recipes import make_chat
        from reprieve.tasks import load_task

        chat = make_chat(self.judge)
        config = read_run(self.folder)
        if missing := {"task", "split", "limit"} - config.keys():
            raise ReprieveError(f"{str(self.folder)!r} holds no run of a task: {', '.join(sorted(missing))} is missing")
        task = load_task(config["task"])
        problems = task.problems(config["split"], config["limit"], offset=config.get("offset", 0))
        with screen.progress_bar("answers") as bar:
            document = judge_run(
                self.folder,
                problems,
                chat,
                baseline=self.baseline,
                num_votes=self.num_votes,
                grade=self.grade,
                num_in_flight=self.num_in_flight,
                progress=screen.reporter(bar),
            )
        for arm in document["arms"]:
            screen.say(f"{arm['arm']}: {_told(arm)}")
        screen.say(f"verdicts: {self.folder / 'verdicts.jsonl'}")
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
