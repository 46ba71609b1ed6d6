"""Problems of the bundled task: what is asked, what has to be computed, and how a solution is worded.

A problem is a question, a list of arithmetic steps and an answer. The same steps can be told in two wordings at
several *choice points* (opener, hedge, body, operand order, step order, introduction). A `Style` holds the
probability of the second wording at each of them. Target and draft are trained on different styles, so they disagree
on words far more often than on numbers, which is what the relaxed rules need to have something to rescue.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from reprieve.pair.families import FAMILIES, LARGE, SMALL, Step

SPLITS = ("train", "validation", "test")
# Share of the hash space each split owns. A question belongs to exactly one split, whatever the seeds.
_VALIDATION_BUCKETS = range(16)
_TEST_BUCKETS = range(16, 48)
_NUM_BUCKETS = 256
# What the task's problems are like; the models are trained on mixtures of their own. Chosen on the validation split, so
# that target and draft are as far apart as the papers' pairs are (docs/measured/pair.md).
LARGE_SHARE = 0.25
FAMILY_WEIGHTS = {"chain": 1.0, "compare": 0.3, "shop": 1.0, "work": 1.0, "share": 1.5}


@dataclass(frozen=True)
class Style:
    """Probability, 0 to 1, of the second wording at each choice point."""

    intro: float = 0.0
    opener: float = 0.0
    hedge: float = 0.0
    body: float = 0.0
    commute: float = 0.0
    order: float = 0.0

    @classmethod
    def uniform(cls, probability: float) -> Style:
        """The same probability at every choice point."""
        return cls(*[probability] * 6)


@dataclass(frozen=True)
class Problem:
    """A question, the steps that solve it, and the answer (the last step's result)."""

    problem_id: str
    family: str
    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def prompt(self) -> str:
        """The exact text a model is given; the solution follows it."""
        return f"Question: {self.question}\nAnswer:"


def split_of(question: str) -> str:
    """The one split a question belongs to, from a hash of its text, so that splits cannot overlap."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % _NUM_BUCKETS
    if bucket in _VALIDATION_BUCKETS:
        return "validation"
    return "test" if bucket in _TEST_BUCKETS else "train"


def draw_problem(
    split: str,
    index: int,
    *,
    seed: int = 0,
    family_weights: dict[str, float] | None = None,
    large_share: float = LARGE_SHARE,
    step_weights: tuple[float, ...] | None = None,
) -> Problem:
    """Problem number `index` of a split; the same arguments always give the same problem.

    Args:
        split: one of `SPLITS`.
        index: 0 or more.
        seed: another seed gives other problems of the same split.
        family_weights: relative frequency of each family; the task's own when None.
        large_share: how many of the problems use large numbers.
        step_weights: relative frequency of 2, 3, 4, 5 and 6 steps; equal when None.

    Raises:
        ValueError: unknown split or family, or a negative index.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if index < 0:
        raise ValueError(f"index must be 0 or more, got {index}")
    weights = family_weights or FAMILY_WEIGHTS
    if unknown := set(weights) - set(FAMILIES):
        raise ValueError(f"family_weights names {sorted(unknown)}; families are {sorted(FAMILIES)}")
    rng = random.Random(f"{seed}:{split}:{index}")
    family = rng.choices(list(weights), list(weights.values()))[0]
    while True:
        ranges = LARGE if rng.random() < large_share else SMALL
        num_steps = rng.choices(range(2, 7), step_weights)[0] if step_weights else rng.randint(2, 6)
        question, steps = FAMILIES[family](rng, num_steps, ranges)
        if split_of(question) == split:
            return Problem(f"{split}-{seed}-{index}", family, question, tuple(steps))


def write_solution(problem: Problem, style: Style, rng: random.Random) -> str:
    """The worked solution in one style, with a leading space, ending in `The final answer is N.`."""

    def second(probability: float) -> bool:
        return rng.random() < probability

    sentences = ["Here is the whole story." if second(style.intro) else "Let us work through this."]
    steps = _ordered(problem.steps, reverse=second(style.order))
    for number, step in enumerate(steps):
        place = 0 if number == 0 else 2 if number == len(steps) - 1 else 1
        opener = (("First", "Initially"), ("Then", "Next"), ("Finally", "Lastly"))[place][second(style.opener)]
        hedge = "it follows that" if second(style.hedge) else "we know that"
        equation = step.equation(commuted=second(style.commute))
        if second(style.body):
            body = f"the number of {step.unit} {step.subject} {step.verb}{step.tail} is {equation}"
        else:
            body = f"{step.subject} {step.verb} a total of {equation} {step.unit}{step.tail}"
        sentences.append(f"{opener}, {hedge} {body}.")
    sentences.append(f"The final answer is {problem.answer}.")
    return " " + " ".join(sentences)


def _ordered(steps: tuple[Step, ...], *, reverse: bool) -> list[Step]:
    """Steps in the order told: those marked `free` come first and may be told backwards."""
    free = [step for step in steps if step.free]
    return (free[::-1] if reverse else free) + [step for step in steps if not step.free]
