"""Run every arm on every problem, interleaved, resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import ReprieveError, SpecError
from reprieve.evaluation.arms import DRAFT_ONLY, Arm, build_decoder
from reprieve.evaluation.environment import commit, machine, versions
from reprieve.evaluation.records import ProblemRecord, RecordFile, claim_folder
from reprieve.models import Pair
from reprieve.tasks import Task, TaskProblem

Progress = Callable[[int, int], None]  # finished and all (problem, arm) pairs


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run measures; kept in its folder and compared when it is resumed."""

    command: str
    target: str
    draft: str | None
    drafter: str
    dtype: str
    device: str
    weights: str
    task: str
    split: str
    limit: int
    seed: int
    sampling: dict[str, Any]
    num_draft_tokens: list[int]
    arms: list[str]
    heads: dict[str, str] = field(default_factory=dict)  # fingerprints, by name


@dataclass
class Run:
    """A finished or interrupted comparison."""

    config: RunConfig
    arms: list[Arm]
    records: list[ProblemRecord]
    environment: dict[str, Any]
    complete: bool


def run_arms(
    config: RunConfig,
    arms: Sequence[Arm],
    pair: Pair,
    task: Task,
    folder: Path,
    *,
    progress: Progress = lambda done, total: None,
) -> Run:
    """Measure; what is already in `folder` is not measured again.

    Arms take turns problem by problem, in an order that rotates, so that a noisy machine hits all alike. Each arm
    answers one problem unrecorded first, to warm up. Ctrl-C ends the run between problems with `complete=False`.

    Raises:
        SpecError: a limit below 1.
        ReprieveError: the folder holds another run, or every problem failed.
    """
    if config.limit < 1:
        raise SpecError(f"limit must be 1 or more, got {config.limit}")
    problems = task.problems(config.split, config.limit)
    if not arms or not problems:
        raise SpecError(f"task {task.name} has no problems in split {config.split!r}")
    file = claim_folder(folder, dataclasses.asdict(config))
    decoders = {arm.label: build_decoder(arm, pair, drafter=config.drafter, task=config.task) for arm in arms}
    params = SamplingParams(
        max_new_tokens=task.max_new_tokens, seed=config.seed, stop=tuple(task.stop), **config.sampling
    )
    run = Run(config, list(arms), file.records, environment(), complete=False)
    try:
        _measure(file, decoders, arms, problems, task, params, progress)
        run.complete = True
    except KeyboardInterrupt:
        pass
    if run.records and all(record.error for record in run.records):
        raise ReprieveError(f"every problem failed; the first error: {run.records[0].error}")
    return run


def environment() -> dict[str, Any]:
    """Commit, versions and machine, as results record them."""
    return {"commit": commit(), "versions": versions(), "machine": machine()}


def _measure(
    file: RecordFile,
    decoders: dict[str, SpeculativeDecoder],
    arms: Sequence[Arm],
    problems: Sequence[TaskProblem],
    task: Task,
    params: SamplingParams,
    progress: Progress,
) -> None:
    done = {(record.arm, record.problem_id) for record in file.records}
    total = len(arms) * len(problems)
    if len(done) < total:
        for decoder in decoders.values():
            _answer(decoder, problems[0], task, dataclasses.replace(params, max_new_tokens=24), "warm-up")
    for number, problem in enumerate(problems):
        turn = number % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            if (arm.label, problem.problem_id) in done:
                continue
            seeded = dataclasses.replace(params, seed=params.seed * 1_000_003 + number)
            file.append(_answer(decoders[arm.label], problem, task, seeded, arm.label))
            progress(len(file.records), total)


def _answer(
    decoder: SpeculativeDecoder, problem: TaskProblem, task: Task, params: SamplingParams, label: str
) -> ProblemRecord:
    """One arm on one problem. An error is recorded as an error, never as an answer."""
    try:
        made = decoder.generate(problem.prompt, params)
    except Exception as error:  # whatever it is, the other problems are still worth measuring
        told = f"{type(error).__name__}: {error}"
        return ProblemRecord(label, problem.problem_id, False, None, 0, 0, 0, 0, 0, 0.0, "error", "", error=told)
    answer = task.extract_answer(made.text)
    drafted_alone = label == DRAFT_ONLY
    return ProblemRecord(
        arm=label,
        problem_id=problem.problem_id,
        correct=task.equivalent(answer, problem.reference),
        answer=answer,
        num_tokens=len(made.tokens),
        num_rounds=0 if drafted_alone else made.num_rounds,  # rounds are target forwards
        num_drafted=made.num_drafted,
        num_accepted=made.num_accepted,
        num_rescued=made.num_rescued,
        seconds=made.seconds,
        finish_reason=made.finish_reason,
        text=made.text,
        **dataclasses.asdict(made.times),
    )
