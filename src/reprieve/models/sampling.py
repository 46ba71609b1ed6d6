"""Sampling: temperature, top-k and top-p by transformers' processors, and a seeded generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from reprieve.rules.accept import truncated_tokens
from reprieve.settings import SamplingParams


class Sampler:
    """Sampler of one answer. Target and draft share the processors; one generator makes all draws."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self.params = params
        self.generator = torch.Generator(device=device).manual_seed(params.seed)
        self.greedy = params.greedy
        self._target = _processors(params, params.temperature)
        temperature = params.temperature if params.draft_temperature is None else params.draft_temperature
        self.draft_greedy = temperature == 0.0
        self._draft = self._target if self.draft_greedy else _processors(params, temperature)

    def target_scores(self, logits: Tensor) -> Tensor:
        """Return logits whose softmax the target's tokens are drawn from, [n, V]; unchanged when greedy."""
        scores = self._target(None, logits) if self._target else logits  # type: ignore[arg-type]
        if self.params.truncation is None:
            return scores
        rows = [truncated_tokens(self.params.truncation, *row) for row in zip(logits, scores, strict=True)]
        return scores.masked_fill(~torch.stack(rows), -math.inf)

    def draft_scores(self, logits: Tensor) -> Tensor:
        """Return the same for the draft. A greedy draft with a sampling target is processed like the target."""
        return self._draft(None, logits) if self._draft else logits  # type: ignore[arg-type]

    def draft_token(self, logits: Tensor) -> Tensor:
        """Return the drafter's next token [1] from its logits [1, V]."""
        if self.draft_greedy:
            return logits.argmax(-1)
        return self.draw(self.draft_scores(logits).softmax(-1))

    def draw(self, probs: Tensor) -> Tensor:
        """Draw a token from each row of probabilities, [n, V] to [n]."""
        return torch.multinomial(probs.to(self.generator.device), 1, generator=self.generator).squeeze(-1)

    def uniforms(self, size: int) -> Tensor:
        """Draw uniform numbers in [0, 1), [size]."""
        return torch.rand(size, generator=self.generator, device=self.generator.device)


def _processors(params: SamplingParams, temperature: float) -> LogitsProcessorList | None:
    if temperature == 0.0:
        return None
    processors = LogitsProcessorList()
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    return processors
