"""Rollouts of an arbiter."""

import pytest
import torch

from recipes.arbiter.rollouts import SampledArbiterRule, rollout_of
from reprieve.engine import SamplingParams
from reprieve.models.arbiter import ArbiterAdvisor
from reprieve.rules import accepts
from reprieve.types import Evidence
from tests.kit.arbiters import PROMPT, decoder_with, trained


def test_sampled_decisions_follow_the_policy():
    generator = torch.Generator().manual_seed(0)
    num = 20_000
    seen = Evidence(
        token_ids=torch.zeros(num, dtype=torch.long),
        target_logits=torch.zeros(num, 3),
        greedy=True,
        lossless_accepts=torch.zeros(num, dtype=torch.bool),
        noise=torch.rand(num, generator=generator),
        advice=torch.full((num,), 0.3),
    )
    assert accepts(SampledArbiterRule(), seen).float().mean().item() == pytest.approx(0.3, abs=0.01)


def test_a_rollout_keeps_effective_decisions_with_their_probabilities(target, draft):
    model = trained(draft)
    made = decoder_with(target, draft, SampledArbiterRule(), ArbiterAdvisor(model)).generate(
        PROMPT, SamplingParams(max_new_tokens=61, temperature=1.0, seed=5), trace=True
    )
    found = rollout_of(made, correct=True)
    assert list(found.context_ids) == PROMPT + made.token_ids
    num_rejected = 0
    for taken in found.rounds:
        asked = taken.arbitration
        *before, last = taken.decisions
        assert all(decision.accepted for decision in before), "nothing behind a rejection is effective"
        num_rejected += not last.accepted
        end = asked.context_length + last.position - 1
        committed = found.context_ids[end]
        assert committed == (asked.draft_ids if last.accepted else asked.target_ids)[last.position - 1]
        with torch.no_grad():
            probs = model.judge(found.context_ids, [asked])[0].sigmoid()
            text = torch.tensor([[*found.context_ids[: asked.context_length], *asked.draft_ids]])
            log_probs = target(text).logits[0].log_softmax(-1)
        for decision in taken.decisions:
            place = decision.position - 1
            assert asked.draft_ids[place] != asked.target_ids[place], "matched tokens are no decisions"
            assert decision.old_prob == pytest.approx(float(probs[place]), abs=1e-4)
            expected = log_probs[asked.context_length - 1 + place, asked.draft_ids[place]]
            assert decision.target_log_prob == pytest.approx(float(expected), abs=1e-3)
    assert num_rejected > 3
