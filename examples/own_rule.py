"""A rule of your own: a frozen dataclass with a risk and a threshold. Spans and composition come with it."""

from dataclasses import dataclass

import reprieve


@reprieve.register_rule
@dataclass(frozen=True)
class UnsureRule(reprieve.Rule):
    """Rescue anything where the target's entropy is at least `nats`."""

    name = "unsure"

    nats: float = 0.5

    @property
    def threshold(self):
        return -self.nats

    def risk(self, evidence):
        probs = evidence.target_probs
        return (probs * probs.clamp_min(1e-30).log()).sum(-1)  # minus the entropy


decoder = reprieve.load_pair().decoder("unsure:nats=0.2&floor:min_prob=0.01")
answer = decoder.generate(
    "Question: Sam has 12 toys. He sells 5 toys. He buys 9 toys. How many toys does Sam have now?\nAnswer:"
)
print(answer.text, answer.num_rescued)
