"""Sampling scores against transformers' own processors."""

import math

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from reprieve.models.sampling import Sampler, draw_at, keyed_uniforms
from reprieve.settings import SamplingParams


def test_top_p_after_top_k_is_transformers():
    """Only the tokens that top-k leaves are sorted; the scores are the same."""
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(0)) * 3
    expected = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, logits / 0.6))
    scores = Sampler(SamplingParams(temperature=0.6, top_p=0.8, top_k=20), torch.device("cpu")).target_scores(logits)
    assert torch.equal(scores, expected)
    assert 5 <= int((scores > -math.inf).sum()) < 5 * 20


def test_scores_of_a_text_do_not_depend_on_the_others_where_tokens_tie():
    logits = torch.randn(40, 400, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    sampler = Sampler(SamplingParams(temperature=0.6, top_p=0.9, top_k=20), torch.device("cpu"))
    together = sampler.target_scores(logits)
    for row in range(len(logits)):
        assert torch.equal(sampler.target_scores(logits[row : row + 1])[0], together[row])


@pytest.mark.parametrize("purpose", [0, 3])
def test_keyed_numbers_are_uniform_and_independent(purpose):
    """Over seeds and positions as runs use them: consecutive, and large ones for miners."""
    from scipy.stats import chisquare, kstest

    for first in (0, 7 * 1_000_003, 2**55 + 1):
        seeds, positions = torch.arange(first, first + 300).repeat_interleave(200), torch.arange(200).repeat(300)
        numbers = keyed_uniforms(seeds, positions, purpose)
        assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
        assert kstest(numbers.numpy(), "uniform").pvalue > 1e-3
        table = numbers.view(300, 200)
        for pairs in (
            (table[:-1], table[1:]),
            (table[:, :-1], table[:, 1:]),
            (table, keyed_uniforms(seeds, positions, 1).view(300, 200)),
        ):
            cells = [(pair * 8).long().flatten() for pair in pairs]
            counts = torch.bincount(cells[0] * 8 + cells[1], minlength=64)
            assert chisquare(counts.tolist()).pvalue > 1e-3


def test_a_number_picks_the_token_at_its_cumulative_probability():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(4, 1)
    assert draw_at(probs, torch.tensor([0.0, 0.2499, 0.25, 0.99999994])).tolist() == [1, 1, 3, 3]
