"""A language model compares a run's answers with the lossless ones (AutoJudge, appendix L)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reprieve.bench.records import ProblemRecord
from reprieve.bench.settings import VerdictSettings
from reprieve.concurrency import results_of
from reprieve.errors import ReprieveError, SpecError
from reprieve.files import append_line, read_records, replace_file
from reprieve.stats import grouped_interval
from reprieve.tasks import TaskProblem
from reprieve.tasks.chat import FIRST_BETTER, SECOND_BETTER, Chat, ask_verdict
from reprieve.types import Progress, no_progress


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on one answer: -1, 0 or 1 relative to the baseline's."""

    arm: str
    problem_id: str
    trial: int
    judge: str
    baseline: str
    num_votes: int
    category: str
    votes: list[str]
    score: float | None  # None where the judge gave no verdict

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.arm, self.problem_id, self.trial)

    def made_with(self, settings: VerdictSettings) -> bool:
        """Return whether these settings would give this verdict."""
        return all(getattr(self, name) == value for name, value in settings.recorded.items())


async def compare_answers(
    chat: Chat, problem: TaskProblem, record: ProblemRecord, baseline: ProblemRecord, *, num_votes: int
) -> tuple[list[str], float | None]:
    """Compare two answers, each vote in both orders against position bias; return the votes and the score.

    Equal texts are a tie, without a judge.
    """
    texts = (conversation(problem, baseline), conversation(problem, record))
    votes: list[str] = []
    score: float | None = 0.0
    if texts[0] != texts[1]:
        points = []
        for number in range(num_votes):
            for first, second, sign in ((*texts, 1), (*texts[::-1], -1)):
                vote = await ask_verdict(chat, problem.question_text, first, second, number=number)
                votes.append(vote or "none")
                if vote:
                    points.append(sign * ((vote in SECOND_BETTER) - (vote in FIRST_BETTER)))
        score = float(np.sign(sum(points))) if points else None
    return votes, score


def conversation(problem: TaskProblem, record: ProblemRecord) -> str:
    """Return all turns as one text, or only the answer if there is one turn."""
    if not problem.follow_ups:
        return record.text
    said = zip((problem.question_text, *problem.follow_ups), record.turns or [record.text], strict=False)
    return "\n\n".join(f"User: {message}\n\nAssistant: {answer}" for message, answer in said)


def judge_run(
    folder: Path,
    problems: Sequence[TaskProblem],
    records: Sequence[ProblemRecord],
    chat: Chat,
    settings: VerdictSettings,
    *,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Judge every answer of a run that is not judged yet; verdicts are kept as they come, in `verdicts.jsonl`.

    Raises:
        SpecError: the baseline has no answers.
        ReprieveError: damaged verdicts, or the judge cannot be asked.
    """
    baseline, num_votes = settings.baseline, settings.num_votes
    path = folder / "verdicts.jsonl"
    records = [record for record in records if not record.error]
    strict = {(record.problem_id, record.trial): record for record in records if record.arm == baseline}
    if not strict:
        raise SpecError(f"baseline must be an arm with answers, got {baseline!r}")
    by_id = {problem.problem_id: problem for problem in problems}
    try:
        read = list(read_records(path, Verdict, "verdict", repair=True, signed=True))
    except ReprieveError as error:
        raise ReprieveError(f"{error}; delete the file to judge every answer again") from None
    verdicts = [verdict for verdict in read if verdict.made_with(settings)]
    done = {verdict.key for verdict in verdicts}
    todo = [
        record
        for record in records
        if (record.arm, record.problem_id, record.trial) not in done
        and record.problem_id in by_id
        and record.arm != baseline
        and (record.problem_id, record.trial) in strict
    ]

    async def judge(record: ProblemRecord) -> Verdict:
        problem = by_id[record.problem_id]
        other = strict[record.problem_id, record.trial]
        try:
            votes, score = await compare_answers(chat, problem, record, other, num_votes=num_votes)
        except Exception as error:  # a server has many ways to refuse
            raise ReprieveError(f"the judge could not be asked: {type(error).__name__}: {error}") from None
        return Verdict(
            arm=record.arm,
            problem_id=record.problem_id,
            trial=record.trial,
            **settings.recorded,
            category=problem.category,
            votes=votes,
            score=score,
        )

    async def judge_all() -> None:
        async for finished in results_of(todo, judge, num_parallel=settings.num_in_flight):
            for verdict in finished:
                append_line(path, asdict(verdict), f"the {len(verdicts)} verdicts before it")
                verdicts.append(verdict)
                progress(len(verdicts), len(done) + len(todo))

    asyncio.run(judge_all())
    document = summarise_verdicts(verdicts, baseline)
    replace_file(folder / "judged.json", json.dumps(document, indent=2) + "\n")
    return document


def summarise_verdicts(verdicts: Sequence[Verdict], baseline: str) -> dict[str, Any]:
    """Per arm and category: wins, ties and losses, with the share of equal or better."""
    arms = []
    for arm in dict.fromkeys(verdict.arm for verdict in verdicts):
        arm_verdicts = [verdict for verdict in verdicts if verdict.arm == arm]
        row: dict[str, Any] = {"arm": arm, **_summary(arm_verdicts)}
        categories = sorted({verdict.category for verdict in arm_verdicts} - {""})
        row["categories"] = {name: _summary([v for v in arm_verdicts if v.category == name]) for name in categories}
        arms.append(row)
    return {"schema": 1, "baseline": baseline, "arms": arms}


def _summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    scores = np.array([verdict.score for verdict in verdicts if verdict.score is not None])
    counts: dict[str, Any] = {"num_judged": len(scores), "num_without_verdict": len(verdicts) - len(scores)}
    if not len(scores):
        return counts
    ids = [verdict.problem_id for verdict in verdicts if verdict.score is not None]
    wins, losses = int((scores > 0).sum()), int((scores < 0).sum())
    not_worse = len(scores) - losses
    return {
        **counts,
        "num_wins": wins,
        "num_ties": not_worse - wins,
        "num_losses": losses,
        "equal_or_better": not_worse / len(scores),
        "equal_or_better_ci95": list(grouped_interval(scores >= 0, ids)),
    }
