"""A rule of your own: a frozen dataclass with a risk and a threshold. Sweeps, limits and spans come with it."""

from dataclasses import dataclass

import reprieve
from reprieve.evaluation.arms import Arm, build_decoder
from reprieve.rules import Rule
from reprieve.rules.distributions import entropy


@dataclass(frozen=True)
class UnsureRule(Rule):
    """Rescue anything where the target's entropy is at least `nats`."""

    name = "unsure"
    dial = "nats"
    strictest = float("inf")

    nats: float = 0.5

    @property
    def threshold(self):
        return -self.nats

    def risk(self, evidence):
        return -entropy(evidence.target_probs)


decoder = build_decoder(Arm("unsure", UnsureRule(nats=0.2), 16), reprieve.load_pair())
answer = decoder.generate("Question: Sam has 12 toys. He sells 5 toys. How many toys does Sam have?\nAnswer:")
print(answer.text, answer.num_rescued)
