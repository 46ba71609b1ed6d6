"""Run every arm on every problem, interleaved, resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import ReprieveError, SpecError
from reprieve.evaluation.arms import DRAFT_ONLY, Arm, FoldedDecoder, build_decoders
from reprieve.evaluation.conversation import Conversation
from reprieve.evaluation.energy import EnergyMeter
from reprieve.evaluation.environment import commit, machine, versions
from reprieve.evaluation.provenance import provenance_spans
from reprieve.evaluation.records import ProblemRecord, RecordFile, claim_folder
from reprieve.heads.certificates import Conditions
from reprieve.models import Pair
from reprieve.tasks import Task, TaskProblem
from reprieve.types import Generation, RoundTimes

Progress = Callable[[int, int], None]  # finished and all (problem, trial, arm) triples


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
    offset: int = 0
    num_trials: int = 1
    chat_template: bool = False

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("offset", 0), ("num_trials", 1)):
            if getattr(self, name) < least:
                raise SpecError(f"{name} must be {least} or more, got {getattr(self, name)}")

    @classmethod
    def of(cls, pair: Pair, arms: Sequence[Arm], **settings: Any) -> RunConfig:
        """The configuration of a run of these arms on this pair; the rest is given by name."""
        ks = list(dict.fromkeys(arm.num_draft_tokens for arm in arms if arm.rule is not None))
        return cls(
            target=pair.target_name,
            draft=pair.draft_name,
            weights=f"{pair.identity.target_weights}+{pair.identity.draft_weights}",
            dtype=str(pair.target.dtype).removeprefix("torch."),
            device=str(pair.device),
            num_draft_tokens=ks,
            arms=[arm.label for arm in arms],
            heads={name: head.fingerprint for arm in arms if arm.rule for name, head in arm.rule.heads},
            **settings,
        )

    def conditions(self, pair: Pair, arm: Arm) -> Conditions:
        """What a certificate of this arm holds for."""
        return Conditions(
            pair=pair.identity,
            task=self.task,
            sampling=self.sampling,
            num_draft_tokens=arm.num_draft_tokens,
            drafter=self.drafter,
            dtype=self.dtype,
            chat_template=self.chat_template,
        )


@dataclass
class Run:
    """A finished or interrupted comparison."""

    config: RunConfig
    arms: list[Arm]
    records: list[ProblemRecord]
    environment: dict[str, Any]
    complete: bool


class Runner:
    """A run's folder, problems and decoders; `measure` does what is missing.

    Arms take turns problem by problem, in an order that rotates, so that a noisy machine hits all alike. Each arm
    answers one problem unrecorded first, to warm up.

    Raises:
        SpecError: a task without problems here.
        ReprieveError: the folder holds another run.
    """

    def __init__(self, config: RunConfig, arms: Sequence[Arm], pair: Pair, task: Task, folder: Path) -> None:
        self.problems = task.problems(config.split, config.limit, offset=config.offset)
        if not arms or not self.problems:
            raise SpecError(f"task {task.name} has no problems {config.offset} and on in split {config.split!r}")
        self.config = config
        self.arms = list(arms)
        self.pair = pair
        self.task = task
        self.file: RecordFile = claim_folder(folder, dataclasses.asdict(config))
        self.meter = EnergyMeter(str(pair.device))
        self._decoders: dict[str, SpeculativeDecoder | FoldedDecoder] = {}
        self._params = SamplingParams(
            max_new_tokens=task.max_new_tokens, seed=config.seed, stop=tuple(task.stop), **config.sampling
        )

    @property
    def records(self) -> list[ProblemRecord]:
        return self.file.records

    def measure(self, arms: Sequence[Arm] | None = None, progress: Progress = lambda done, total: None) -> bool:
        """Answer what these arms (all by default) have not answered yet; False where Ctrl-C ended it between answers.

        Raises:
            PairError: a head made for another pair.
            ReprieveError: every problem failed.
        """
        chosen = self.arms if arms is None else list(arms)
        labels = {arm.label for arm in chosen}
        try:
            self._measure(chosen, progress)
        except KeyboardInterrupt:
            return False
        ours = [record for record in self.records if record.arm in labels]
        if ours and all(record.error for record in ours):
            raise ReprieveError(f"every problem failed; the first error: {ours[0].error}")
        return True

    def _measure(self, arms: list[Arm], progress: Progress) -> None:
        done = {(record.arm, record.problem_id, record.trial) for record in self.records}
        places = [(number, trial) for number in range(len(self.problems)) for trial in range(self.config.num_trials)]
        keys = {(arm.label, self.problems[n].problem_id, trial) for arm in arms for n, trial in places}
        left = len(keys - done)
        for arm in arms if left else ():
            self._answer(arm, self.problems[0], dataclasses.replace(self._params, max_new_tokens=24), 0)
        for turn, (number, trial) in enumerate(places):
            seed = (self.config.seed + trial) * 1_000_003 + number
            for arm in [*arms[turn % len(arms) :], *arms[: turn % len(arms)]]:
                problem = self.problems[number]
                if (arm.label, problem.problem_id, trial) in done:
                    continue
                self.file.append(self._answer(arm, problem, dataclasses.replace(self._params, seed=seed), trial))
                left -= 1
                progress(len(keys) - left, len(keys))

    def _decoder(self, arm: Arm, problem: TaskProblem) -> SpeculativeDecoder:
        if arm.label not in self._decoders:
            self._decoders[arm.label] = build_decoders(
                arm,
                self.pair,
                drafter=self.config.drafter,
                task=self.config.task,
                here=self.config.conditions(self.pair, arm),
            )
        decoder = self._decoders[arm.label]
        return decoder.outside(problem.problem_id) if isinstance(decoder, FoldedDecoder) else decoder

    def _answer(self, arm: Arm, problem: TaskProblem, params: SamplingParams, trial: int) -> ProblemRecord:
        """One arm on one problem. An error is recorded as an error, never as an answer."""
        decoder = self._decoder(arm, problem)
        before = self.meter.joules()
        try:
            made = self._converse(decoder, problem, arm.params(params))
        except Exception as error:  # whatever it is, the other problems are still worth measuring
            told = f"{type(error).__name__}: {error}"
            return ProblemRecord(
                arm.label, problem.problem_id, False, None, 0, 0, 0, 0, 0, 0.0, "error", "", error=told, trial=trial
            )
        after = self.meter.joules()
        last = made[-1]
        answer = self.task.extract_answer(last.text)
        times = [dataclasses.asdict(part.times) for part in made]
        return ProblemRecord(
            arm=arm.label,
            problem_id=problem.problem_id,
            correct=self.task.equivalent(answer, problem.reference),
            answer=answer,
            num_tokens=sum(len(part.tokens) for part in made),
            # Rounds are target forwards.
            num_rounds=0 if arm.label == DRAFT_ONLY else sum(part.num_rounds for part in made),
            num_drafted=sum(part.num_drafted for part in made),
            num_accepted=sum(part.num_accepted for part in made),
            num_rescued=sum(part.num_rescued for part in made),
            seconds=sum(part.seconds for part in made),
            finish_reason=last.finish_reason,
            text=last.text,
            trial=trial,
            turns=[part.text for part in made] if len(made) > 1 else [],
            round_lengths=[length for part in made for length in part.round_lengths],
            spans=[list(span) for span in provenance_spans(last.tokens, self.pair.tokenizer, params.stop)],
            energy_j=None if before is None or after is None else after - before,
            **{name: sum(part[name] for part in times) for name in RoundTimes.__dataclass_fields__},
        )

    def _converse(self, decoder: SpeculativeDecoder, problem: TaskProblem, params: SamplingParams) -> list[Generation]:
        """The answers of all turns; most problems have one."""
        talk = Conversation(self.pair.tokenizer, problem.prompt, chat_template=self.config.chat_template)
        made = [decoder.generate(talk.prompt(), params)]
        for message in problem.follow_ups:
            talk.add(made[-1].text, message)
            made.append(decoder.generate(talk.prompt(), params))
        return made


def run_arms(
    config: RunConfig,
    arms: Sequence[Arm],
    pair: Pair,
    task: Task,
    folder: Path,
    *,
    progress: Progress = lambda done, total: None,
) -> Run:
    """Measure; what is already in `folder` is not measured again. Ctrl-C ends the run with `complete=False`.

    Raises:
        SpecError: a task without problems here.
        ReprieveError: the folder holds another run, or every problem failed.
    """
    runner = Runner(config, arms, pair, task, folder)
    complete = runner.measure(progress=progress)
    about = {**environment(), "energy": runner.meter.source}
    return Run(config, list(arms), runner.records, about, complete)


def environment() -> dict[str, Any]:
    """Commit, versions and machine, as results record them."""
    return {"commit": commit(), "versions": versions(), "machine": machine()}
