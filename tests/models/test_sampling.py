"""Sampling scores against transformers' own processors."""

import math

import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from reprieve.models.sampling import Sampler
from reprieve.settings import SamplingParams


def test_top_p_after_top_k_is_transformers():
    """Over a large vocabulary only the tokens that top-k left are sorted; the scores are the same."""
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(0)) * 3
    expected = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, logits / 0.6))
    scores = Sampler(SamplingParams(temperature=0.6, top_p=0.8, top_k=20), torch.device("cpu")).target_scores(logits)
    assert torch.equal(scores, expected)
    assert 5 <= int((scores > -math.inf).sum()) < 5 * 20
