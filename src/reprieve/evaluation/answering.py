"""One arm on one problem: a conversation decoded, graded and written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from reprieve.engine import DRAFT_ONLY, FoldedDecoder, Pair, SamplingParams, SpeculativeDecoder
from reprieve.engine.text_stream import Decodes
from reprieve.evaluation.arms import Arm
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.energy import EnergyMeter
from reprieve.evaluation.provenance import provenance_spans
from reprieve.evaluation.records import ProblemRecord
from reprieve.settings import PromptSettings
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.asking import Conversation, PromptFormat, prompt_of
from reprieve.types import PARTS, Generation

WARM_UP_TOKENS = 24


class Answerer:
    """The decoders of a run's arms, made when first needed; the models are shared."""

    def __init__(self, config: RunConfig, pair: Pair, task: Task) -> None:
        self.config = config
        self.pair = pair
        self.task = task
        self.meter = EnergyMeter(str(pair.device))
        self._format = PromptFormat(pair.tokenizer, PromptSettings(**config.prompt))
        self._decoders: dict[str, FoldedDecoder] = {}
        self._params = SamplingParams(
            max_new_tokens=task.max_new_tokens, seed=config.seed, stop=tuple(task.stop), **config.sampling
        )

    def warm_up(self, arm: Arm, problem: TaskProblem) -> None:
        """Answer a problem briefly and unrecorded.

        Raises:
            PairError: a head made for another pair.
        """
        self._answer(arm, problem, dataclasses.replace(self._params, max_new_tokens=WARM_UP_TOKENS), 0)

    def answer(self, arm: Arm, problem: TaskProblem, number: int, trial: int) -> ProblemRecord:
        """Answer the `number`th problem; every problem and trial has draws of its own."""
        seed = (self.config.seed + trial) * 1_000_003 + number
        return self._answer(arm, problem, dataclasses.replace(self._params, seed=seed), trial)

    def _decoder(self, arm: Arm, problem: TaskProblem) -> SpeculativeDecoder:
        if arm.label not in self._decoders:
            self._decoders[arm.label] = arm.decoders(
                self.pair,
                drafter=self.config.drafter,
                task=self.config.task,
                conditions=self.config.conditions(self.pair, arm),
            )
        return self._decoders[arm.label].outside(problem.problem_id)

    def _answer(self, arm: Arm, problem: TaskProblem, params: SamplingParams, trial: int) -> ProblemRecord:
        """One arm on one problem. An error is recorded as an error, never as an answer."""
        decoder = self._decoder(arm, problem)
        before = self.meter.joules()
        try:
            made = self._converse(decoder, problem, arm.params(params))
            after = self.meter.joules()
            answer = self.task.extract_answer(made[-1].text)
            correct = self.task.equivalent(answer, problem.reference)
        except Exception as error:  # whatever it is, the other problems are still worth measuring
            failure = f"{type(error).__name__}: {error}"
            return ProblemRecord(
                arm.label, problem.problem_id, False, None, 0, 0, 0, 0, 0, 0.0, "error", "", error=failure, trial=trial
            )
        record = record_of(arm, problem.problem_id, made, self.pair.tokenizer, params.stop)
        return dataclasses.replace(
            record,
            correct=correct,
            answer=answer,
            trial=trial,
            energy_j=None if before is None or after is None else after - before,
        )

    def _converse(self, decoder: SpeculativeDecoder, problem: TaskProblem, params: SamplingParams) -> list[Generation]:
        """The answers of all turns; most problems have one."""
        made = [decoder.generate(prompt_of(problem), params, timed=True)]
        if not problem.follow_ups:
            return made
        talk = Conversation(self._format, problem.prompt)
        for message in problem.follow_ups:
            talk.add(made[-1].text, message)
            made.append(decoder.generate(talk.prompt(), params, timed=True))
        return made


def record_of(
    arm: Arm, problem_id: str, made: Sequence[Generation], tokenizer: Decodes, stop: tuple[str, ...]
) -> ProblemRecord:
    """What is kept of an answer of one turn or several, not graded yet."""
    last = made[-1]
    return ProblemRecord(
        arm=arm.label,
        problem_id=problem_id,
        correct=False,
        answer=None,
        num_tokens=sum(len(part.tokens) for part in made),
        # Rounds are target forwards.
        num_rounds=0 if arm.label == DRAFT_ONLY else sum(part.num_rounds for part in made),
        num_drafted=sum(part.num_drafted for part in made),
        num_pruned=sum(part.num_pruned for part in made),
        num_accepted=sum(part.num_accepted for part in made),
        num_rescued=sum(part.num_rescued for part in made),
        seconds=sum(part.seconds for part in made),
        finish_reason=last.finish_reason,
        text=last.text,
        turns=[part.text for part in made] if len(made) > 1 else [],
        round_lengths=[length for part in made for length in part.round_lengths],
        spans=[list(span) for span in provenance_spans(last.tokens, tokenizer, stop)],
        seconds_by_part={part: sum(turn.seconds_by_part.get(part, 0.0) for turn in made) for part in PARTS},
    )
