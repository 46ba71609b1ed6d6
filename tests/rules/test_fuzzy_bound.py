"""FSD's bound on a whole answer's distribution, checked on every answer of a tiny language."""

import itertools

import pytest
import torch

from reprieve.rules.distributions import kl_divergence, total_variation
from reprieve.rules.fuzzy import FuzzyRule, fuzzy_divergence

VOCAB, LENGTH = 3, 4


def chance(world, answer):
    """Probability of an answer or a prefix of one; `world` maps each prefix to its next-token distribution."""
    return torch.stack([world[answer[:place]][token] for place, token in enumerate(answer)]).prod()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("divergence", "form"), [("kl", "released"), ("tv", "paper")])
def test_the_answer_distribution_stays_within_the_bound(seed, divergence, form):
    """The draft's distribution applies where the divergence is within the threshold, the target's elsewhere."""
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

    answers = list(itertools.product(range(VOCAB), repeat=LENGTH))
    ours, theirs = (torch.stack([chance(world, answer) for answer in answers]) for world in (target, mixed))
    drafted = sum(float(chance(mixed, prefix) if prefix else 1.0) for prefix in mixed if mixed[prefix] is draft[prefix])
    apart = kl_divergence(theirs, ours) if divergence == "kl" else total_variation(ours, theirs)
    assert 0.0 < float(apart) <= rule.sequence_bound(drafted)
    assert 0.0 < drafted < LENGTH


@pytest.mark.parametrize(
    ("divergence", "first", "second"), [("js", (0.95, 0.3), (0.01, 0.6)), ("kl", (0.95, 0.05), (0.3, 0.99))]
)
def test_divergences_that_do_not_add_up_have_no_bound(divergence, first, second):
    """Two tokens: after a 0 the draft's distribution applies again, after a 1 the target's. Pairs are P(0)."""
    (target, draft), (target_next, draft_next) = (
        [torch.tensor([one, 1 - one], dtype=torch.float64) for one in pair] for pair in (first, second)
    )
    rest = torch.tensor([0.5, 0.5], dtype=torch.float64)
    ours, theirs = {(): target, (0,): target_next, (1,): rest}, {(): draft, (0,): draft_next, (1,): rest}
    apart = [fuzzy_divergence(*pair, divergence=divergence) for pair in ((target, draft), (target_next, draft_next))]
    threshold = float(max(apart))
    answers = list(itertools.product(range(2), repeat=2))
    whole = [torch.stack([chance(world, answer) for answer in answers]) for world in (ours, theirs)]
    drafted = 1.0 + float(draft[0])
    assert float(fuzzy_divergence(*whole, divergence=divergence)) > 1.1 * drafted * threshold
    assert FuzzyRule(threshold=threshold, divergence=divergence).sequence_bound(drafted) is None


@pytest.mark.parametrize("rule", [FuzzyRule(divergence="tv", k=2), FuzzyRule(form="released")])
def test_the_top_k_union_and_the_released_mean_of_kls_have_no_bound(rule):
    assert rule.sequence_bound(3.0) is None
