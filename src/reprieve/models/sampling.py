"""How tokens are drawn: temperature, top-k and top-p through transformers' own processors, and a seeded generator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from reprieve.rules.truncation import truncated_tokens
from reprieve.settings import SamplingParams


class Sampler:
    """Draws tokens for one answer. Target and draft share the processors; every draw comes from one generator."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self.params = params
        self.generator = torch.Generator(device=device).manual_seed(params.seed)
        self.greedy = params.greedy
        self._target = _processors(params, params.temperature)
        temperature = params.temperature if params.draft_temperature is None else params.draft_temperature
        self.draft_greedy = temperature == 0.0
        self._draft = self._target if self.draft_greedy else _processors(params, temperature)

    def target_scores(self, logits: Tensor) -> Tensor:
        """Logits whose softmax the target's tokens are drawn from, [n, V]; unchanged when greedy."""
        scores = self._target(None, logits) if self._target else logits  # type: ignore[arg-type]
        if self.params.truncation is None:
            return scores
        rows = [truncated_tokens(self.params.truncation, *row) for row in zip(logits, scores, strict=True)]
        return scores.masked_fill(~torch.stack(rows), -math.inf)

    def draft_scores(self, logits: Tensor) -> Tensor:
        """The same for the draft. A greedy draft beside a sampling target is shaped as the target is."""
        return self._draft(None, logits) if self._draft else logits  # type: ignore[arg-type]

    def draft_token(self, logits: Tensor) -> Tensor:
        """The drafter's next token [1] from its logits [1, V]."""
        if self.draft_greedy:
            return logits.argmax(-1)
        return self.draw(self.draft_scores(logits).softmax(-1))

    def draw(self, probs: Tensor) -> Tensor:
        """A token from each row of probabilities, [n, V] to [n]."""
        return torch.multinomial(probs.to(self.generator.device), 1, generator=self.generator).squeeze(-1)

    def uniforms(self, size: int) -> Tensor:
        """Draws in [0, 1), [size]."""
        return torch.rand(size, generator=self.generator, device=self.generator.device)


class GumbelNoise:
    """Gumbel noise keyed by (seed, prefix): sampling that is random, and yet the same wherever the prefix is the same.

    The most likely token of log-probabilities plus this noise is distributed as the probabilities are. A suffix
    regenerated after the same prefix is therefore the same, so that a changed answer is the changed token's doing
    (AutoJudge, appendix A).
    """

    def __init__(self, seed: int) -> None:
        self._seed = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8)
        self._generator = torch.Generator()

    def after(self, prefix_ids: Sequence[int], vocab_size: int) -> Tensor:
        """Noise for the token that follows a prefix, [V]."""
        return self.along(prefix_ids, len(prefix_ids), vocab_size)[0]

    def along(self, token_ids: Sequence[int], start: int, vocab_size: int) -> Tensor:
        """Noise for the tokens that follow the prefixes of length `start` to `len(token_ids)`, [n, V]."""
        state = self._seed.copy()
        rows = []
        for length in range(len(token_ids) + 1):
            if length >= start:
                key = int.from_bytes(state.digest(), "little") >> 1
                uniforms = torch.rand(vocab_size, generator=self._generator.manual_seed(key), dtype=torch.float64)
                rows.append(-torch.log(-torch.log(uniforms.clamp_min(1e-300))))
            if length < len(token_ids):
                state.update(int(token_ids[length]).to_bytes(8, "little"))
        return torch.stack(rows)

    def draw(self, scores: Tensor, prefix_ids: Sequence[int]) -> int:
        """The token after a prefix, from its scores [V]."""
        return int((scores.double().cpu() + self.after(prefix_ids, len(scores))).argmax())


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
