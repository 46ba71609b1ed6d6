"""Sampling: temperature, top-k and top-p by transformers' processors, what a rule truncates, and the random draws.

A `Sampler` draws for one answer from a seeded generator. The texts of a batch have a `Draw` each, or random numbers
keyed by seed and position (`keyed_uniforms`): a text's draws do not depend on the others.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reprieve.rules import Rule
from reprieve.rules.base import bounded_risk
from reprieve.settings import SamplingParams
from reprieve.types import Evidence

DRAWS_VERSION = 3  # label stores sampled with another version cannot be resumed
_GOLDEN = -0x61C88647  # 2^32 over the golden ratio, as int32
_MIX = ((16, -0x7A143595), (13, -0x3D4D51CB))  # MurmurHash3's, as int32
_CHUNK = 64  # tokens that a truncating rule judges at once
_SPARSE = 4  # if fewer than 1 in this many tokens is possible, noise is computed for those only


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


def truncated_tokens(
    rule: Rule,
    logits: Tensor,  # [V], raw
    scores: Tensor,  # [V], after temperature, top-k and top-p
) -> Tensor:  # [V], bool
    """Return the mask of tokens that a truncating rule would accept; it always includes the most likely one.

    The fair comparison for a rule that reads only the target's distribution is the target sampling from this set
    ("Revisiting Lossy Verification", arXiv 2607.26627), not the plain target. Such rules accept every token that is
    more likely than an accepted one. Tokens are therefore tried in order of decreasing score, and the search ends with
    the first chunk that contains a refused one.
    """
    kept = torch.zeros_like(scores, dtype=torch.bool)
    order = scores.argsort(descending=True)
    kept[order[0]] = True
    for token_ids in order.split(_CHUNK):
        shape = (len(token_ids), len(scores))
        evidence = Evidence(
            token_ids=token_ids,
            target_logits=logits.expand(shape),
            greedy=False,
            lossless_accepts=torch.zeros_like(token_ids, dtype=torch.bool),
            target_scores=scores.expand(shape),
        )
        passed = bounded_risk(rule, evidence) <= rule.threshold
        kept[token_ids[passed]] = True
        if not bool(passed.all()):
            break
    return kept


def _processors(params: SamplingParams, temperature: float) -> LogitsProcessorList | None:
    if temperature == 0.0:
        return None
    processors = LogitsProcessorList()
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if params.top_k > 0 and params.top_p < 1.0:
        processors.append(_TopKTopP(params.top_k, params.top_p))
    elif params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    elif params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    return processors


class _TopKTopP(LogitsProcessor):
    """Top-k, then top-p of what is left, without sorting the vocabulary.

    As transformers' two processors, except that exactly k tokens remain before top-p if several tie for the last place.
    """

    def __init__(self, top_k: int, top_p: float) -> None:
        self.top_k = top_k
        self.top_p = top_p

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        left, columns = scores.topk(min(self.top_k, scores.shape[-1]))
        probs = left.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of the likelier tokens
        left = left.masked_fill(before >= self.top_p, -math.inf)
        return torch.full_like(scores, -math.inf).scatter(-1, columns, left)


@dataclass(frozen=True)
class UniformDraw:
    """Sampling by one uniform number per token: the first token whose cumulative probability exceeds it."""

    uniform: Callable[[], float]  # in [0, 1)
    seed: int = 0  # for servers, which draw their own numbers


class GumbelNoise:
    """Gumbel noise keyed by (seed, prefix): random, but reproducible for equal prefixes.

    The argmax of log-probabilities plus this noise is a sample from the distribution (the Gumbel-max trick). A suffix
    regenerated after the same prefix is therefore the same, so a changed answer is caused by the changed token
    (AutoJudge, appendix A). The noise is a hash of the prefix's key and the token's id, so it can be computed on any
    device, for any subset of tokens.
    """

    def __init__(self, seed: int) -> None:
        self._seed = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8)

    def keys(self, token_ids: Sequence[int], start: int | None = None) -> list[int]:
        """Return a key for each prefix of length `start` to `len(token_ids)`; by default only for the whole."""
        state = self._seed.copy()
        first = len(token_ids) if start is None else start
        state.update(array("q", token_ids[:first]).tobytes())
        keys = [_key(state)]
        for token_id in token_ids[first:]:
            state.update(array("q", [token_id]).tobytes())
            keys.append(_key(state))
        return keys


Draw = UniformDraw | GumbelNoise


def choose(scores: Tensor, draws: Sequence[Draw | None], texts: Sequence[Sequence[int]]) -> list[int]:
    """Choose the next token of each text.

    Args:
        scores: [n, V]: logits after temperature, top-k and top-p.
        draws: draw of each text; None for its most likely token.
        texts: tokens of each text so far.
    """
    chosen = [0] * len(draws)
    for kind, pick in ((UniformDraw, _by_uniforms), (GumbelNoise, _by_noise), (type(None), _likeliest)):
        rows = [row for row, draw in enumerate(draws) if isinstance(draw, kind)]
        if rows:
            part = scores if len(rows) == len(draws) else scores[rows]
            picked = pick(part, [draws[row] for row in rows], [texts[row] for row in rows])
            for row, token_id in zip(rows, picked.tolist(), strict=True):
                chosen[row] = token_id
    return chosen


def keyed_uniforms(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Return uniform numbers in [0, 1), [n], float32: the same for the same seed, position and purpose.

    Args:
        seeds, positions: [n], int64.
        purpose: separates several draws for one position.
    """
    low, high = ((seeds >> shift).bitwise_and(0x7FFFFFFF).to(torch.int32) for shift in (0, 31))
    state = _mix(_mix(positions.to(torch.int32) * _GOLDEN + low) ^ high)
    state = _mix(state + torch.full_like(state, purpose) * _GOLDEN)
    return (state & 0xFFFFFF).float() * 2.0**-24


def draw_at(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token of each row [n, V] whose cumulative probability exceeds its uniform number, [n]."""
    cumulative = probs.cumsum(-1, dtype=torch.float32 if probs.device.type == "mps" else torch.float64)
    drawn = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    columns = torch.arange(probs.shape[-1], device=probs.device)
    return torch.minimum(drawn, torch.where(probs > 0, columns, -1).amax(-1))


def gumbel_choice(scores: Tensor, keys: Sequence[int]) -> Tensor:
    """Return the highest-scoring token of each row [n, V] after adding the noise of its key, [n]."""
    return _by_rows(scores, torch.tensor(list(keys)), _under_noise)


def _by_noise(scores: Tensor, draws: Sequence[Any], texts: Sequence[Sequence[int]]) -> Tensor:
    return gumbel_choice(scores, [draw.keys(text)[0] for draw, text in zip(draws, texts, strict=True)])


def _by_uniforms(scores: Tensor, draws: Sequence[Any], texts: Sequence[Sequence[int]]) -> Tensor:
    uniforms = torch.tensor([draw.uniform() for draw in draws], dtype=torch.float64)
    return _by_rows(scores, uniforms, _at_uniform)


def _likeliest(scores: Tensor, draws: Sequence[Any], texts: Sequence[Sequence[int]]) -> Tensor:
    return scores.argmax(-1)


def _by_rows(scores: Tensor, values: Tensor, pick: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Pick one possible token per row, [n]; on a CPU row by row, because its caches hold one row.

    Args:
        values: random value or key of each row, [n].
        pick: maps scores and tokens in increasing order, [n, m] each, and values to the index of the chosen one, [n].
    """
    if scores.device.type in ("cpu", "mps"):  # MPS has no float64
        chosen = []
        for row, value in zip(scores.cpu(), values, strict=True):
            likely = row > -math.inf
            columns = torch.arange(len(row)) if bool(likely.all()) else likely.nonzero().squeeze(-1)
            kept = row if len(columns) == len(row) else row[columns]
            chosen.append(columns[pick(kept.unsqueeze(0), columns.unsqueeze(0), value.unsqueeze(0))])
        return torch.cat(chosen)
    num_likely = int((scores > -math.inf).sum(-1).amax())
    columns = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    if num_likely * _SPARSE < scores.shape[-1]:
        columns = scores.topk(num_likely).indices.sort(-1).values
        scores = scores.gather(-1, columns)
    return columns.gather(-1, pick(scores, columns, values.to(scores.device)).unsqueeze(-1)).squeeze(-1)


def _under_noise(scores: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
    return (scores + _gumbel(keys, columns)).argmax(-1)


def _at_uniform(scores: Tensor, columns: Tensor, uniforms: Tensor) -> Tensor:
    return draw_at(scores.softmax(-1), uniforms)


def _gumbel(keys: Tensor, columns: Tensor) -> Tensor:
    """Return noise [n, m], float32, from keys [n], int64, and tokens [n, m]."""
    low, high = (part.to(torch.int32).unsqueeze(-1) for part in (keys & 0x7FFFFFFF, keys >> 31))
    state = _mix(_mix(columns.to(torch.int32) * _GOLDEN + low) ^ high)
    # Computed from 1 - u: float32 is precise near 0, where the noise is large.
    rest = (state & 0x7FFFFFFF).float().mul_(2.0**-31).clamp_min_(2.0**-32)
    return -torch.log(-torch.log1p(-rest))


def _mix(state: Tensor) -> Tensor:
    """Apply MurmurHash3's finaliser, with logical shifts; int32 arithmetic wraps around."""
    for bits, factor in _MIX:
        state = (state ^ ((state >> bits) & ((1 << (32 - bits)) - 1))) * factor
    return state ^ ((state >> 16) & 0xFFFF)


def _key(state: hashlib.blake2b) -> int:
    return int.from_bytes(state.digest(), "little") >> 1
