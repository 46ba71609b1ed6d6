"""How tokens are drawn: temperature, top-k and top-p through transformers' own processors, and a seeded generator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from reprieve.errors import SpecError, require_range
from reprieve.rules import Rule
from reprieve.rules.truncation import require_truncation, truncated_tokens


@dataclass(frozen=True)
class SamplingParams:
    """What is asked of one answer.

    Args:
        max_new_tokens: exact largest number of generated tokens, the end-of-text token included.
        temperature: 0 is greedy.
        top_p: nucleus mass, in (0, 1]; 1 keeps everything.
        top_k: most likely tokens kept; 0 keeps everything.
        seed: same seed, same answer.
        stop: texts that end the answer; the answer's text stops before them.
        draft_temperature: the draft's own temperature; None for the target's. FSD drafts greedily (0).
        ignore_eos: go on after the end-of-text token.
        eos_token_ids: tokens that end the answer; None for the model's and the tokenizer's own.
        num_logprobs: tell each token's log-probability under the target, and those of this many most likely ones, 0
            to 20; None for neither.
        truncation: draw the target's tokens only from those that this rule would accept; None for no such limit.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    draft_temperature: float | None = None
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] | None = None
    num_logprobs: int | None = None
    truncation: Rule | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise SpecError(f"stop must be a tuple of texts, got the text {self.stop!r}")
        if self.max_new_tokens < 1:
            raise SpecError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens!r}")
        require_range("temperature", self.temperature, 0.0, math.inf)
        if math.isinf(self.temperature):
            raise SpecError("temperature must be finite, got inf")
        require_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        if self.top_k < 0:
            raise SpecError(f"top_k must be 0 or more, got {self.top_k!r}")
        if self.draft_temperature is not None:
            require_range("draft_temperature", self.draft_temperature, 0.0, math.inf)
        if self.num_logprobs is not None:
            require_range("num_logprobs", self.num_logprobs, 0, 20)
        if any(not text for text in self.stop):
            raise SpecError("stop must hold texts of at least one character, got an empty one")
        if self.truncation is not None:
            require_truncation(self.truncation)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


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

    def draft_token(self, logits: Tensor) -> int:
        """The drafter's next token from its logits [V]."""
        if self.draft_greedy:
            return int(logits.argmax())
        return self.draw(self.draft_scores(logits.unsqueeze(0))[0].softmax(-1))

    def draw(self, probs: Tensor) -> int:
        """A token from probabilities [V]."""
        return int(torch.multinomial(probs.to(self.generator.device), 1, generator=self.generator))

    def draws(self, probs: Tensor) -> Tensor:
        """A token from each row of probabilities, [n, V] to [n]."""
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(-1)

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
