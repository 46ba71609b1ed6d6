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
    from reprieve.tasks.prompting import PromptedTask

_NUM_TRIED = 4  # problems


@dataclass(frozen=True)
class Trial:
    """Lossless answers to the first problems of the train split; means over them."""

    num_answers: int
    num_draft_tokens: NumDraftTokens
    num_tokens: float
    num_rounds: float
    seconds: float
    num_read: int
    num_right: int
    num_cut_off: int
    example: str  # the end of the first response, the answer read there, and the right one

    def print_summary(self, budget: int) -> None:
        """Say how fast the answers came, how long they are, and how many were read and right."""
        screen.say(
            f"speed: {self.num_tokens / self.seconds:.0f} tokens per second with lossless speculation at K = "
            f"{self.num_draft_tokens}; answers of {self.num_tokens:.0f} tokens; "
            f"{self.num_read} of {self.num_answers} could be read, {self.num_right} were right"
        )
        if self.num_cut_off:
            screen.warn(
                f"ANSWERS CUT OFF: {self.num_cut_off} of {self.num_answers} at {budget} tokens: raise --max-new-tokens"
            )

    @property
    def doubt(self) -> str:
        """Return the reason why long work on these answers may be lost; empty if there is none."""
        if not self.num_read:
            return f"no answer could be read: check --grader and the prompt. {self.example}"
        if not self.num_right:
            return (
                f"none of {self.num_answers} answers was right: check --answer, --grader and the prompt; a certificate "
                f"needs problems that the target solves. {self.example}"
            )
        return ""


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
    num, first = len(answers), answers[0]
    reference = next(problem.reference for problem in problems if problem.problem_id == first.problem_id)
    return Trial(
        num_answers=num,
        num_draft_tokens=num_draft_tokens,
        num_tokens=sum(answer.num_tokens for answer in answers) / num,
        num_rounds=max(1.0, sum(answer.num_rounds for answer in answers) / num),
        seconds=sum(answer.seconds for answer in answers) / num,
        num_read=sum(answer.answer is not None for answer in answers),
        num_right=sum(answer.correct for answer in answers),
        num_cut_off=sum(answer.cut_off for answer in answers),
        example=(
            f"The right answer to the first problem is {reference!r}, the one read {first.answer!r}; the response "
            f"ends:\n{first.text.strip()[-300:]}"
        ),
    )
