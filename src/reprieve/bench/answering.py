"""Answer one problem with one arm: decode the conversation, grade it, and return its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

from reprieve.bench.arms import Arm
from reprieve.bench.engine import Job, RunConfig
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.engine import SamplingParams
from reprieve.errors import EngineError, PairError
from reprieve.tasks import Task, TaskProblem, run_comparison
from reprieve.tasks.prompting import PromptFormat, prompt_of
from reprieve.types import DecodingStats, Generation

WARM_UP_TOKENS = 24


class Answerer:
    """Answers a run's problems with an engine and grades the answers.

    Args:
        decode: decodes one turn, given the arm, the problem, the prompt and the sampling parameters.
    """

    Decode: TypeAlias = Callable[[Arm, TaskProblem, str | list[int], SamplingParams], Awaitable[Reply]]

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        tokenizer: Any,
        arms: Sequence[Arm],
        problems: Sequence[TaskProblem],
        decode: Decode,
    ) -> None:
        self.config = config
        self.task = task
        self._arms = {arm.label: arm for arm in arms}
        self._problems = problems
        self._decode = decode
        self._format = PromptFormat(tokenizer, config.prompt)
        self.params = SamplingParams(
            max_new_tokens=task.max_new_tokens, seed=config.seed, stop=tuple(task.stop), **vars(config.sampling)
        )

    async def warm_up(self, arm: Arm) -> None:
        """Decode a few tokens of the first problem, without recording them.

        Raises:
            PairError: a head made for another pair.
        """
        params = dataclasses.replace(self.params, max_new_tokens=WARM_UP_TOKENS)
        await self._answer(arm, self._problems[0], params, 0)

    async def answer(self, job: Job) -> ProblemRecord:
        """Answer one problem with one arm; the random draws depend on the problem and the trial."""
        params = self.params.for_problem(job.number, job.trial)
        return await self._answer(self._arms[job.arm], self._problems[job.number], params, job.trial)

    async def _answer(self, arm: Arm, problem: TaskProblem, params: SamplingParams, trial: int) -> ProblemRecord:
        """Answer and grade one problem with one arm. A failure is recorded as an error, never as an answer."""
        try:
            turns = await self._converse(arm, problem, arm.params(params))
            answer = self.task.extract_answer(turns[-1].text)
            correct = await run_comparison(self.task, self.task.equivalent, answer, problem.reference)
        except (EngineError, PairError):  # no problem can be answered: end the run
            raise
        except Exception as error:  # any error: the other problems can still be measured
            return ProblemRecord(
                arm=arm.label,
                problem_id=problem.problem_id,
                trial=trial,
                correct=False,
                answer=None,
                text="",
                finish_reason="error",
                error=f"{type(error).__name__}: {error}",
                **DecodingStats.total(()).stats,
            )
        last = turns[-1]
        return ProblemRecord(
            arm=arm.label,
            problem_id=problem.problem_id,
            trial=trial,
            correct=correct,
            answer=answer,
            text=last.text,
            finish_reason=last.finish_reason,
            spans=last.spans,
            turns=[turn.text for turn in turns] if len(turns) > 1 else [],
            **DecodingStats.total(turns).stats,
        )

    async def _converse(self, arm: Arm, problem: TaskProblem, params: SamplingParams) -> list[Reply]:
        """Return the replies of all turns; most problems have one turn."""
        replies = [await self._decode(arm, problem, prompt_of(problem), params)]
        if not problem.follow_ups:
            return replies
        messages = [{"role": "user", "content": problem.prompt}]
        for message in problem.follow_ups:
            messages += self._format.next_turn(replies[-1].text, message)
            replies.append(await self._decode(arm, problem, self._format.encode(messages), params))
        return replies


def reply_of(arm: Arm, generation: Generation) -> Reply:
    """Convert the local engine's output to the `Reply` that all engines return."""
    reply = Reply(
        text=generation.text,
        finish_reason=generation.finish_reason,
        spans=spans_of(generation.pieces),
        **generation.stats,
    )
    return dataclasses.replace(reply, num_rounds=0) if arm.alone == "draft" else reply  # rounds are target forwards


def spans_of(pieces: Sequence[tuple[str, str]]) -> list[list[Any]]:
    """Merge neighbouring pieces of equal provenance: number of characters; t (target), m (matched) or r (rescued).

    Args:
        pieces: see `Generation.pieces`.
    """
    runs = groupby((piece for piece in pieces if piece[0]), key=itemgetter(1))
    return [[sum(len(text) for text, _ in run), provenance[0]] for provenance, run in runs]
