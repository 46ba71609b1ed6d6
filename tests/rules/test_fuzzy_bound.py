"""FSD's bound on a whole answer's distribution, against all answers of a small world, one by one."""

import itertools

import pytest
import torch

from reprieve.rules.distributions import kl_divergence, total_variation
from reprieve.rules.fuzzy import FuzzyRule, fuzzy_divergence

VOCAB, LENGTH = 3, 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("divergence", "form"), [("kl", "released"), ("tv", "paper")])
def test_no_answers_distribution_is_further_away_than_the_bound(seed, divergence, form):
    """The draft speaks wherever the divergence is small enough, else the target: what sampled drafts come to."""
    made = torch.Generator().manual_seed(seed)
    target = {}
    draft = {}
    for length in range(LENGTH):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            ours = torch.randn(VOCAB, generator=made, dtype=torch.float64)
            target[prefix] = ours.softmax(-1)
            draft[prefix] = (ours + 0.5 * torch.randn(VOCAB, generator=made, dtype=torch.float64)).softmax(-1)
    rule = FuzzyRule(threshold=0.08, divergence=divergence, form=form)
    mixed = {
        prefix: draft[prefix]
        if fuzzy_divergence(ours, draft[prefix], divergence=divergence, form=form) <= rule.threshold
        else ours
        for prefix, ours in target.items()
    }

    def chance(world, answer):
        return torch.stack([world[answer[:place]][token] for place, token in enumerate(answer)]).prod()

    answers = list(itertools.product(range(VOCAB), repeat=LENGTH))
    ours, theirs = (torch.stack([chance(world, answer) for answer in answers]) for world in (target, mixed))
    drafted = sum(float(chance(mixed, prefix) if prefix else 1.0) for prefix in mixed if mixed[prefix] is draft[prefix])
    apart = kl_divergence(theirs, ours) if divergence == "kl" else total_variation(ours, theirs)
    assert 0.0 < float(apart) <= rule.sequence_bound(drafted)
    assert 0.0 < drafted < LENGTH
