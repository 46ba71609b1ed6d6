"""Run every arm on every problem, interleaved, resumable."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

from reprieve.bench.arms import Arm
from reprieve.bench.engine import Engine, Job, RunConfig
from reprieve.bench.records import ProblemRecord, RecordFile, claim_run
from reprieve.errors import EngineError, ReprieveError
from reprieve.heads.loading import name_problems, seen_problems
from reprieve.tasks import Task
from reprieve.tasks.prompting import problems_of
from reprieve.types import Progress, no_progress


class Run:
    """A comparison with its folder and problems; `measure` generates the missing answers.

    Arms take turns problem by problem, in a rotating order, so that machine noise affects all of them alike.

    Args:
        extendable: whether arms may be added to an existing folder. Always allowed if the engine answers several
            problems at once, which measures no speed. Do not set it for timing runs: added arms do not alternate with
            the earlier ones.

    Raises:
        SpecError: a task without problems here, or an arm that the engine cannot decode.
        ReprieveError: the folder holds another run.
    """

    def __init__(
        self,
        config: RunConfig,
        arms: Sequence[Arm],
        engine: Engine,
        task: Task,
        folder: Path,
        *,
        extendable: bool = False,
    ) -> None:
        self.problems = problems_of(task, config, engine.num_positions)
        self.config = config
        self.arms = list(arms)
        self.engine = engine
        self.task = task
        self.complete = False
        for arm in self.arms:
            if arm.rule is not None and (seen := seen_problems(arm.rule, self.problems)):
                warnings.warn(
                    f"{arm.label}: its head was made from {len(seen)} of these {len(self.problems)} problems "
                    f"({name_problems(seen)}): results on these say little about other problems",
                    stacklevel=2,
                )
            if arm.certificate is not None:
                arm.certificate.check(config.conditions(engine, arm), where=f"of {arm.label}")
        added = ("arms", "heads") if extendable or engine.num_parallel > 1 else ()
        self.file: RecordFile = claim_run(folder, dataclasses.asdict(config), extendable=added)

    @property
    def records(self) -> list[ProblemRecord]:
        return self.file.records

    def measure(self, arms: Sequence[Arm] | None = None, progress: Progress = no_progress) -> bool:
        """Generate the missing answers of these arms (default: all); return False after Ctrl-C. Sets `complete`.

        Raises:
            PairError: a head made for another pair.
            EngineError: a process or server died; finished answers are kept.
            ReprieveError: every problem failed.
        """
        self.complete = False
        chosen = self.arms if arms is None else list(arms)
        labels = {arm.label for arm in chosen}
        try:
            jobs = self._missing(chosen)
            total = len(chosen) * len(self.problems) * self.config.num_trials
            if jobs:
                progress(total - len(jobs), total)
            answers = self.engine.answer(self.config, self.task, chosen, self.problems, jobs) if jobs else iter(())
            for number, record in enumerate(answers, start=total - len(jobs) + 1):
                self.file.append(record)
                progress(number, total)
        except KeyboardInterrupt:
            return False
        except EngineError as error:
            raise EngineError(f"{error}; {len(self.records)} answers are kept, run again to resume") from None
        chosen_records = [record for record in self.records if record.arm in labels]
        if chosen_records and all(record.error for record in chosen_records):
            raise ReprieveError(f"every problem failed; the first error: {chosen_records[0].error}")
        self.complete = True
        return True

    def _missing(self, arms: list[Arm]) -> list[Job]:
        """Return the unanswered jobs in the order to run them; failed ones are tried once more."""
        done = {(record.arm, record.problem_id, record.trial) for record in self.records if not record.error}
        jobs = []
        trials = [(number, trial) for number in range(len(self.problems)) for trial in range(self.config.num_trials)]
        for turn, (number, trial) in enumerate(trials):
            for arm in [*arms[turn % len(arms) :], *arms[: turn % len(arms)]]:
                if (arm.label, self.problems[number].problem_id, trial) not in done:
                    jobs.append(Job(arm.label, number, trial))
        return jobs
