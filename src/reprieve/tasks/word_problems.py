"""The bundled tasks: generated grade-school word problems.

A problem is a question, a list of arithmetic steps and an answer. How the bundled models word their solutions is in
`recipes/pair/wordings.py`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from reprieve.errors import require_choice, require_whole
from reprieve.tasks import Task, TaskProblem, register_task
from reprieve.tasks.families import FAMILIES, LARGE, ROUND, SMALL, ProblemStep
from reprieve.tasks.graders import Grader, NumberGrader

SPLITS = ("train", "validation", "test")
# Share of the hash space each split owns. A question belongs to exactly one split, whatever the seeds.
_VALIDATION_BUCKETS = range(16)
_TEST_BUCKETS = range(16, 48)
_NUM_BUCKETS = 256


@dataclass(frozen=True)
class Contents:
    """Composition of a set of problems.

    Args:
        family_weights: relative frequency of each family.
        large_share: how many of the problems use large numbers, 0 to 1.
        large_shares: `large_share` of single families, by name.
        round_share: how many of the `share` problems of two or more steps ask any percentage of round numbers, 0 to 1.
        step_weights: relative frequency of each number of steps, from `fewest_steps` on; None for 2 to 6 equally.
        fewest_steps: number of steps that the first weight of `step_weights` belongs to.
    """

    family_weights: Mapping[str, float]
    large_share: float
    large_shares: Mapping[str, float] = field(default_factory=dict)
    round_share: float = 0.0
    step_weights: tuple[float, ...] | None = None
    fewest_steps: int = 2


# Mixtures of the tasks' problems; the models are trained on other mixtures. They were chosen on the validation split so
# that the gap between target and draft is similar to that of the papers' pairs (docs/pair.md).
ARITHMETIC = Contents({"chain": 1.0, "compare": 0.3, "shop": 1.0, "work": 1.0, "share": 1.5}, large_share=0.25)
MINIATURE = Contents(
    {"chain": 1.15, "compare": 0.05, "shop": 0.7, "work": 1.1, "share": 1.5},
    large_share=0.25,
    large_shares={"share": 0.5},
    round_share=0.36,
    step_weights=(1.0, 1.2, 1.2, 1.2, 1.2, 1.0, 0.7, 0.5),
    fewest_steps=1,
)


@dataclass(frozen=True)
class GeneratedProblem(TaskProblem):
    """A word problem with the steps that solve it; the last one's result is the answer."""

    family: str = ""
    steps: tuple[ProblemStep, ...] = ()

    @property
    def answer(self) -> int:
        return self.steps[-1].result


def split_of(question: str) -> str:
    """The one split a question belongs to, from a hash of its text, so that splits cannot overlap."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % _NUM_BUCKETS
    if bucket in _VALIDATION_BUCKETS:
        return "validation"
    return "test" if bucket in _TEST_BUCKETS else "train"


def draw_problem(split: str, index: int, *, seed: int = 0, contents: Contents = ARITHMETIC) -> GeneratedProblem:
    """GeneratedProblem number `index` of a split; the same arguments always give the same problem.

    Args:
        split: one of `SPLITS`.
        index: 0 or more.
        seed: another seed gives other problems of the same split.
        contents: what the problems are like.

    Raises:
        SpecError: unknown split, or a negative index.
    """
    require_choice("split", split, SPLITS)
    require_whole("index", index, 0)
    rng = random.Random(f"{seed}:{split}:{index}")
    weights, steps_like = contents.family_weights, contents.step_weights
    family = rng.choices(list(weights), list(weights.values()))[0]
    while True:
        ranges = LARGE if rng.random() < contents.large_shares.get(family, contents.large_share) else SMALL
        if steps_like:
            numbers = range(contents.fewest_steps, contents.fewest_steps + len(steps_like))
            num_steps = rng.choices(numbers, steps_like)[0]
        else:
            num_steps = rng.randint(2, 6)
        rounds = contents.round_share if family == "share" and num_steps > 1 else 0.0
        if rounds and rng.random() < rounds:
            ranges = ROUND
        question, steps = FAMILIES[family](rng, num_steps, ranges)
        if split_of(question) == split:
            name, prompt, answer = f"{split}-{seed}-{index}", f"Question: {question}\nAnswer:", str(steps[-1].result)
            return GeneratedProblem(name, prompt, answer, question=question, family=family, steps=tuple(steps))


@register_task
@dataclass
class ArithmeticTask(Task):
    """Word problems of 2 to 6 steps; the answer is the number after "The final answer is"."""

    contents: ClassVar[Contents] = ARITHMETIC

    name: str = field(default="arithmetic", init=False)
    graded: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=SPLITS, init=False)
    max_new_tokens: int = field(default=256, init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        return [draw_problem(split, index, contents=self.contents) for index in range(offset, offset + limit)]

    def wrap(self, question: str) -> str:
        return question if question.startswith("Question:") else f"Question: {question.strip()}\nAnswer:"


@register_task
@dataclass
class WordProblemsTask(ArithmeticTask):
    """The bundled pair's: 1 to 8 steps, more percentages of large numbers."""

    contents: ClassVar[Contents] = MINIATURE

    name: str = field(default="word_problems", init=False)
    max_new_tokens: int = field(default=300, init=False)
