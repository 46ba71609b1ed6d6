"""A rule and a task, as a third-party package would register them."""

from dataclasses import dataclass, field

import torch

from reprieve import Rule, register_rule
from reprieve.rules import Dial
from reprieve.tasks import Grader, Task, TaskProblem, register_task
from reprieve.tasks.graders import NumberGrader


@register_rule
@dataclass(frozen=True)
class SurprisalRule(Rule):
    """Rescue a token whose surprisal under the target is at most `bits`."""

    name = "surprisal"
    own_dial = Dial("bits", strictest=0.0, stops=(0.5, 1, 2, 4, 8))

    bits: float = 2.0

    @property
    def threshold(self):
        return self.bits

    def risk(self, evidence):
        probs = evidence.target_probs.gather(-1, evidence.token_ids[..., None])[..., 0]
        return -torch.log2(probs)


@register_task
@dataclass
class CoinsTask(Task):
    """Two-step word problems about Ben's coins."""

    name: str = field(default="coins", init=False)
    graded: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=("test",), init=False)
    max_new_tokens: int = field(default=120, init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def problems(self, split, limit, *, offset=0):
        numbers = ((11 + 3 * index, 4 + index) for index in range(offset, offset + limit))
        return [
            TaskProblem(
                f"coins-{has}-{more}",
                self.wrap(f"Ben has {has} coins. He buys {more} more coins. He sells 5 coins."),
                str(has + more - 5),
            )
            for has, more in numbers
        ]

    def wrap(self, question):
        return f"Question: {question} How many coins does Ben have now?\nAnswer:"
