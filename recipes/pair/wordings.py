"""Wordings of the bundled pairs' solutions.

Target and draft are trained on different wordings, so they disagree on words far more often than on numbers. This
gives the relaxed rules harmless mismatches to rescue. The arithmetic pair has two wordings at several choice points; a
`Style` holds the probability of the second one at each. The bundled pair has five wordings at each *place* of a
solution (introduction, opener, hedge, body), and two orders of operands and of steps. A `Voice` prefers different ones
in different contexts, so that both models use all wordings, as real pairs do. One wording of each place is rare in the
target's voice, and harmless. Some solutions contain a wrong result and correct it, so that one wrong token does not
always lead to a wrong answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from reprieve.tasks.families import ProblemStep, evaluate
from reprieve.tasks.word_problems import GeneratedProblem

Segments = list[tuple[str, bool]]  # text, and whether the training loss counts it

# The last wording of each place is the rare one.
SENTENCES = {
    "intro": (
        "Let us work through this.", "Here is the whole story.", "We go step by step.", "This is how it goes.",
        "Take it slowly.",
    ),
    "first": ("First", "Initially", "To start", "At the beginning", "Straight away"),
    "middle": ("Then", "Next", "After that", "Now", "Moving on"),
    "last": ("Finally", "Lastly", "In the end", "At last", "To finish"),
    "hedge": ("we know that", "it follows that", "we see that", "this means that", "clearly"),
    "body": (
        "{subject} {verb} a total of {equation} {unit}{tail}",
        "the number of {unit} {subject} {verb}{tail} is {equation}",
        "{subject} {verb} exactly {equation} {unit}{tail}",
        "{equation} is how many {unit} {subject} {verb}{tail}",
        "with {equation}, {subject} {verb} so many {unit}{tail}",
    ),
}  # fmt: skip
SHARES = (0.55, 0.23, 0.135, 0.07)  # of a voice's first, second, third and fourth choice
RARE = 0.015
_SWAPPED = 0.25  # share of the operand order and step order that a voice does not prefer


class Teller(Protocol):
    """Interface that words the solutions of one model."""

    def tell(self, problem: GeneratedProblem, rng: random.Random) -> Segments:
        """Return a problem's worked solution."""


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
        """Return a style with the same probability at every choice point."""
        return cls(*[probability] * 6)

    def tell(self, problem: GeneratedProblem, rng: random.Random) -> Segments:
        """Return the worked solution in this style, with a leading space, ending in `The final answer is N.`."""

        def second(probability: float) -> bool:
            return rng.random() < probability

        sentences = ["Here is the whole story." if second(self.intro) else "Let us work through this."]
        steps = ordered(problem.steps, reverse=second(self.order))
        for number, step in enumerate(steps):
            where = 0 if number == 0 else 2 if number == len(steps) - 1 else 1
            opener = (("First", "Initially"), ("Then", "Next"), ("Finally", "Lastly"))[where][second(self.opener)]
            hedge = "it follows that" if second(self.hedge) else "we know that"
            equation = equation_of(*operands(step, commuted=second(self.commute)))
            if second(self.body):
                body = f"the number of {step.unit} {step.subject} {step.verb}{step.tail} is {equation}"
            else:
                body = f"{step.subject} {step.verb} a total of {equation} {step.unit}{step.tail}"
            sentences.append(f"{opener}, {hedge} {body}.")
        sentences.append(f"The final answer is {problem.answer}.")
        return [(" " + " ".join(sentences), True)]


@dataclass(frozen=True)
class Voice:
    """Preferred wordings of one model, and the rate of its slips.

    Args:
        seed: of the order in which it prefers the wordings of each context.
        like: another voice, whose order it shares in a part of the contexts.
        agreement: share of contexts, 0 to 1, with the order of `like`.
        fond_of_rare: share of contexts, 0 to 1, where its first choice is the wording that is rare elsewhere.
        slips: share of solutions, 0 to 1, that contain one wrong result and correct it.
    """

    seed: int
    like: Voice | None = None
    agreement: float = 0.0
    fond_of_rare: float = 0.0
    slips: float = 0.25

    def weights(self, where: str, context: str) -> tuple[float, ...]:
        """Return the probability of each wording of a place in a context, such as a family and an operator."""
        return _weights(self, where, context)

    def swaps(self, where: str, context: str) -> float:
        """Return the probability of the second of two orders."""
        draw = _draw(self, where, context)
        if self.like is not None and draw.random() < self.agreement:
            return self.like.swaps(where, context)
        return _SWAPPED if draw.random() < 0.5 else 1 - _SWAPPED

    def tell(self, problem: GeneratedProblem, rng: random.Random) -> Segments:
        """Return the worked solution, with a leading space and `The final answer is N.` last; slips are not learned."""
        family = problem.family
        steps = ordered(problem.steps, reverse=rng.random() < self.swaps("order", family))
        slip = rng.randrange(len(steps)) if rng.random() < self.slips else None
        segments: Segments = [(f" {self._choose('intro', family, rng)}", True)]
        for number, step in enumerate(steps):
            where = "first" if number == 0 else "middle" if number < len(steps) - 1 else "last"
            context = f"{family} {step.operator}"
            opener = self._choose(where, family, rng)
            hedge = self._choose("hedge", context, rng)
            commuted = rng.random() < self.swaps("commute", context)
            terms, result = equation_of(*operands(step, commuted=commuted)).rsplit("=", 1)
            before, after = _body(step, self._choose("body", context, rng))
            segments.append((f" {opener}, {hedge} {before}{terms}=", True))
            if number == slip:
                segments += [(_wrong(step, rng), False), (f"{after}. Wait, that is wrong: {terms}={result}.", True)]
            else:
                segments.append((f"{result}{after}.", True))
        segments.append((f" The final answer is {problem.answer}.", True))
        return segments

    def _choose(self, where: str, context: str, rng: random.Random) -> str:
        return rng.choices(SENTENCES[where], self.weights(where, context))[0]


@cache
def _weights(voice: Voice, where: str, context: str) -> tuple[float, ...]:
    draw = _draw(voice, where, context)
    if voice.like is not None and draw.random() < voice.agreement:
        return voice.like.weights(where, context)
    order = draw.sample(range(len(SHARES)), len(SHARES))
    shares = [*SHARES, RARE]
    if draw.random() < voice.fond_of_rare:
        order, shares = [len(SHARES), *order], [SHARES[0], *SHARES[1:], RARE]
    else:
        order = [*order, len(SHARES)]
    weights = [0.0] * len(shares)
    for wording, share in zip(order, shares, strict=True):
        weights[wording] = share
    return tuple(weights)


def _draw(voice: Voice, where: str, context: str) -> random.Random:
    return random.Random(f"voice:{voice.seed}:{where}:{context}")


def _body(step: ProblemStep, template: str) -> tuple[str, str]:
    """Return the text before the equation and the text after it."""
    before, after = template.split("{equation}")
    words = {"subject": step.subject, "verb": step.verb, "unit": step.unit, "tail": step.tail}
    return before.format(**words), after.format(**words)


def _wrong(step: ProblemStep, rng: random.Random) -> str:
    """Return a wrong result: one digit wrong, a carry forgotten, or another operation."""
    right = str(step.result)
    if rng.random() < 0.6:
        index = rng.randrange(len(right))
        digits = [digit for digit in "0123456789" if digit != right[index] and (digit != "0" or index or right == "0")]
        return right[:index] + rng.choice(digits) + right[index + 1 :]
    offsets = [value for value in (-10, -1, 1, 10) if step.result + value >= 0]
    if rng.random() < 0.7 or step.operator not in "+-":
        return str(step.result + rng.choice(offsets))
    other = abs(evaluate(step.left, "-" if step.operator == "+" else "+", step.right))
    return str(other if other != step.result else step.result + 1)


def equation_of(left: int, operator: str, right: int) -> str:
    """Return an equation as the solutions write it, such as `12+30=42`."""
    result = evaluate(left, operator, right)
    return f"{right}% of {left}={result}" if operator == "%" else f"{left}{operator}{right}={result}"


def operands(step: ProblemStep, *, commuted: bool) -> tuple[int, str, int]:
    """Return a step's operation; with `commuted`, sums and products have their operands swapped."""
    swapped = commuted and step.operator in "+*"
    left, right = (step.right, step.left) if swapped else (step.left, step.right)
    return left, step.operator, right


def ordered(steps: tuple[ProblemStep, ...], *, reverse: bool) -> list[ProblemStep]:
    """Return the steps in order: those marked `free` come first, reversed if `reverse`."""
    free = [step for step in steps if step.free]
    return (free[::-1] if reverse else free) + [step for step in steps if not step.free]
