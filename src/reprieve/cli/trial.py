"""Trial answers before a long run: their speed, and whether they can be read and are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprieve.bench.settings import RunSettings
from reprieve.cli import screen
from reprieve.errors import ReprieveError
from reprieve.settings import NumDraftTokens

if TYPE_CHECKING:
    from reprieve.bench.engine import Engine
    from reprieve.bench.records import ProblemRecord
    from reprieve.tasks.prompting import PromptedTask

_NUM_TRIED = 4  # problems


@dataclass(frozen=True)
class Trial:
    """Lossless answers to the first problems of the train split.

    Args:
        reference: the right answer to the first of them.
    """

    answers: list[ProblemRecord]
    reference: str
    num_draft_tokens: NumDraftTokens

    def mean(self, name: str) -> float:
        """Return the mean of a number that every answer records."""
        return float(sum(getattr(answer, name) for answer in self.answers)) / len(self.answers)

    def print_summary(self, budget: int) -> None:
        """Say how fast the answers came, how long they are, and how many were read and right."""
        num, tokens = len(self.answers), self.mean("num_tokens")
        screen.say(
            f"speed: {tokens / self.mean('seconds'):.0f} tokens per second with lossless speculation at K = "
            f"{self.num_draft_tokens}; answers of {tokens:.0f} tokens; {self._num_read} of {num} could be read, "
            f"{self._num_right} were right"
        )
        if num_cut_off := sum(answer.cut_off for answer in self.answers):
            screen.warn(f"ANSWERS CUT OFF: {num_cut_off} of {num} at {budget} tokens: raise --max-new-tokens")

    @property
    def _num_read(self) -> int:
        return sum(answer.answer is not None for answer in self.answers)

    @property
    def _num_right(self) -> int:
        return sum(answer.correct for answer in self.answers)

    @property
    def doubt(self) -> str:
        """Return the reason why long work on these answers may be lost; empty if there is none."""
        if self._num_right:
            return ""
        first = self.answers[0]
        example = (
            f"The right answer to the first problem is {self.reference!r}, the one read {first.answer!r}; the response "
            f"ends:\n{first.text.strip()[-300:]}"
        )
        if not self._num_read:
            return f"no answer could be read: check --grader and the prompt. {example}"
        return (
            f"none of {len(self.answers)} answers was right: check --answer, --grader and the prompt; a certificate "
            f"needs problems that the target solves. {example}"
        )


def try_answers(
    engine: Engine, task: PromptedTask, task_spec: str, num_draft_tokens: NumDraftTokens, *, seed: int
) -> Trial:
    """Answer a few problems losslessly.

    Raises:
        ReprieveError: an answer failed.
    """
    from reprieve.bench.arms import LOSSLESS, make_arm
    from reprieve.bench.engine import Job, RunConfig

    arm = make_arm(LOSSLESS, num_draft_tokens, target=engine.facts.pair.target)
    config = RunConfig.of(engine, [arm], RunSettings(task=task_spec, split="train", limit=_NUM_TRIED, seed=seed))
    problems = task.problems("train", _NUM_TRIED)
    jobs = [Job(arm.label, number, 0) for number in range(len(problems))]
    answers = []
    with screen.progress("trial answers") as progress:
        for answer in engine.answer(config, task, [arm], problems, jobs):
            answers.append(answer)
            progress(len(answers), len(jobs))
    if failed := next((answer.error for answer in answers if answer.error), None):
        raise ReprieveError(f"the pair cannot answer: {failed}")
    reference = next(problem.reference for problem in problems if problem.problem_id == answers[0].problem_id)
    return Trial(answers, reference, num_draft_tokens)
