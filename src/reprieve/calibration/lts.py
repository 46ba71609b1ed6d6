"""Calibrating the Local Tolerance Score: ARC-Decode's Algorithm 1, its buckets and its finite-sample correction.

Every position of some answers of the target's is a sample: what would the target's next-step distribution be after
its most likely token there, and after another of its likely ones? One forward per answer reads all of them, as leaves
of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from reprieve.errors import SpecError, require_choice, require_range
from reprieve.heads.lts import BUCKETS, LtsCalibration
from reprieve.models import Pair
from reprieve.models.cached_model import CachedModel
from reprieve.models.response_tree import ResponseTree
from reprieve.models.sampling import Sampler, SamplingParams
from reprieve.rules.distributions import entropy, js_divergence
from reprieve.rules.fuzzy import top_k_union
from reprieve.rules.lts import lts_bound, raw_scores
from reprieve.types import Evidence

_MAX_LEAVES = 128  # a forward: the tree's mask grows with the square of its nodes


@dataclass(frozen=True)
class LtsRecipe:
    """What is calibrated and how.

    Args:
        delta: share of positions that the bound may miss, (0, 1); the paper uses 0.05.
        top_k: candidates are drawn from the target's k most likely tokens, its first choice left out, and divergences
            are taken on the union of both distributions' k most likely: the paper's active vocabulary. 2 or more.
        safety: alpha, the factor on the log-probability side, 1 or more.
        bucket_by: `none`, `entropy`, `distance` or `margin`; `num_buckets` equally filled ones.
        confidence: replace each empirical quantile by the Clopper-Pearson upper limit for it at this confidence; None
            for the quantiles themselves.
        seed: of the candidates.
    """

    delta: float = 0.05
    top_k: int = 10
    safety: float = 1.0
    bucket_by: str = "none"
    num_buckets: int = 4
    confidence: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_range("delta", self.delta, 0.0, 0.5, low_open=True)
        if self.top_k < 2:
            raise SpecError(f"top_k must be 2 or more, got {self.top_k!r}")
        require_range("safety", self.safety, 1.0, 1e6)
        require_choice("bucket_by", self.bucket_by, BUCKETS)
        if self.num_buckets < 1:
            raise SpecError(f"num_buckets must be 1 or more, got {self.num_buckets!r}")
        if self.confidence is not None:
            require_range("confidence", self.confidence, 0.5, 0.999999)


@dataclass(frozen=True)
class Swaps:
    """Tokens in another's place, and what that does to the next step: [n] each, float64."""

    divergence: np.ndarray  # JS of the two next-step distributions on their top-k union, nats
    distance: np.ndarray  # squared, whitened, of the embeddings
    margin: np.ndarray  # squared, of the log-probabilities
    entropy: np.ndarray  # of the target's distribution, nats

    @classmethod
    def join(cls, parts: Sequence[Swaps]) -> Swaps:
        names = ("divergence", "distance", "margin", "entropy")
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @property
    def num(self) -> int:
        return len(self.divergence)


def next_step_divergence(logits: Tensor, other: Tensor, *, k: int) -> Tensor:
    """JS of two next-step distributions [..., V] on the union of their k most likely tokens: [...], nats."""
    return js_divergence(*top_k_union(logits.softmax(-1), other.softmax(-1), k))


def whitening(embeddings: Tensor) -> Tensor:
    """The diagonal of W: one over each coordinate's standard deviation over the vocabulary; [V, D] to [D]."""
    return 1 / embeddings.detach().float().std(0).clamp_min(1e-6)


@torch.inference_mode()
def measure_swaps(
    target: CachedModel,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    places: Sequence[int],
    token_ids: Sequence[int],
    *,
    sampler: Sampler,
    scale: Tensor,
    top_k: int,
) -> Swaps:
    """What each token does in its place of an answer, against the target's most likely token there.

    Args:
        places: of the answer, one for each of `token_ids`.
        sampler: how the answer was decoded: margins are those of its scores.
    """
    parts = [
        _measure(
            target,
            prompt_ids,
            answer_ids,
            places[first : first + _MAX_LEAVES],
            token_ids[first : first + _MAX_LEAVES],
            sampler,
            scale,
            top_k,
        )
        for first in range(0, len(places), _MAX_LEAVES)
    ]
    return Swaps.join(parts) if parts else Swaps(*(np.empty(0) for _ in range(4)))


def _measure(
    target: CachedModel,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    places: Sequence[int],
    token_ids: Sequence[int],
    sampler: Sampler,
    scale: Tensor,
    top_k: int,
) -> Swaps:
    target.start(list(prompt_ids[:-1]), reuse_prefix=True)
    plain, _ = target.forward([prompt_ids[-1], *answer_ids[: max(places)]])
    judging = plain[list(places)]  # row i judges the answer's token i
    top_ids = judging.argmax(-1)
    tree = ResponseTree(answer_ids[: max(places) + 1])
    for place, token_id, top_id in zip(places, token_ids, top_ids.tolist(), strict=True):
        tree.add(place, token_id)
        tree.add(place, top_id)
    logits, _ = tree.read(target, prompt_ids)
    rows = [tree.row(place, token_id) for place, token_id in zip(places, token_ids, strict=True)]
    top_rows = [tree.row(place, top_id) for place, top_id in zip(places, top_ids.tolist(), strict=True)]
    evidence = _evidence(target, judging, torch.tensor(list(token_ids), device=judging.device), sampler)
    distance, margin = raw_scores(evidence, scale)
    found = (
        next_step_divergence(logits[rows], logits[top_rows], k=top_k),
        distance,
        margin,
        entropy(evidence.target_probs),
    )
    return Swaps(*(values.double().cpu().numpy() for values in found))


def _evidence(target: CachedModel, logits: Tensor, token_ids: Tensor, sampler: Sampler) -> Evidence:
    scores = sampler.target_scores(logits)
    return Evidence(
        token_ids=token_ids,
        target_logits=logits,
        greedy=sampler.greedy,
        lossless_accepts=torch.zeros_like(token_ids, dtype=torch.bool),
        target_scores=None if sampler.greedy else scores,
        token_embeddings=target.embed(token_ids),
        top_embeddings=target.embed(scores.argmax(-1)),
    )


@torch.inference_mode()
def draw_candidates(
    target: CachedModel,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    sampler: Sampler,
    top_k: int,
    generator: torch.Generator,
) -> list[int]:
    """For every place of an answer one of the target's k most likely tokens, its first choice left out (line 5)."""
    target.start(list(prompt_ids[:-1]), reuse_prefix=True)
    logits, _ = target.forward([prompt_ids[-1], *answer_ids[:-1]])
    likely = sampler.target_scores(logits).topk(min(top_k, logits.shape[-1]), dim=-1).indices[:, 1:]
    drawn = torch.randint(likely.shape[1], (len(likely), 1), generator=generator).to(likely.device)
    return likely.gather(1, drawn).squeeze(1).tolist()


def collect_swaps(
    pair: Pair,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    recipe: LtsRecipe,
    params: SamplingParams,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, Swaps]:
    """Whitening, and one candidate for every place of the target's own answers (Algorithm 1, lines 1 to 10).

    Args:
        texts: tokens of each prompt and of the target's answer to it.
        params: how the answers were decoded.
    """
    embeddings: Any = pair.target.get_input_embeddings()
    scale = whitening(embeddings.weight)
    target, sampler = pair.cached_target(), Sampler(params, pair.device)
    generator = torch.Generator().manual_seed(recipe.seed)
    parts = []
    for number, (prompt_ids, answer_ids) in enumerate(texts):
        if answer_ids:
            candidates = draw_candidates(
                target, prompt_ids, answer_ids, sampler=sampler, top_k=recipe.top_k, generator=generator
            )
            parts.append(
                measure_swaps(
                    target,
                    prompt_ids,
                    answer_ids,
                    range(len(answer_ids)),
                    candidates,
                    sampler=sampler,
                    scale=scale,
                    top_k=recipe.top_k,
                )
            )
        progress(number + 1, len(texts))
    if not parts:
        raise SpecError("calibration needs at least one answer of one token, got none")
    return scale, Swaps.join(parts)


def fit(pair: Pair, task: str, scale: Tensor, swaps: Swaps, recipe: LtsRecipe, **settings: Any) -> LtsCalibration:
    """The constants from the samples (Algorithm 1, lines 11 to 14), in each bucket.

    Raises:
        SpecError: too few samples for the quantile, or for its limit at the confidence asked.
    """
    edges = _edges(swaps, recipe)
    constants = []
    buckets = np.searchsorted(edges, _values(swaps, recipe.bucket_by)) if len(edges) else np.zeros(swaps.num, int)
    for bucket in range(len(edges) + 1):
        inside = buckets == bucket
        divergence, distance, margin = (values[inside] for values in (swaps.divergence, swaps.distance, swaps.margin))
        factor = upper_quantile(_ratio(divergence, distance), recipe)
        logit_factor = recipe.safety * upper_quantile(_ratio(divergence, margin), recipe)
        bound = np.minimum(factor * distance, logit_factor * margin)
        constants.append((factor, logit_factor, upper_quantile(bound, recipe)))
    factors, logit_factors, tolerances = (
        torch.tensor(values, dtype=torch.float32) for values in zip(*constants, strict=True)
    )
    return LtsCalibration(
        scale=scale.cpu(),
        embedding_factors=factors,
        logit_factors=logit_factors,
        tolerances=tolerances,
        edges=torch.tensor(edges, dtype=torch.float32),
        pair=pair.identity,
        task=task,
        delta=recipe.delta,
        bucket_by=recipe.bucket_by,
        settings={**asdict(recipe), "num_positions": swaps.num, **settings},
    )


def bounds_of(calibration: LtsCalibration, swaps: Swaps) -> tuple[np.ndarray, np.ndarray]:
    """U and tau_delta of each swap, nats: [n] each."""
    values = torch.tensor(_values(swaps, calibration.bucket_by))
    bucket = torch.bucketize(values, calibration.edges.double()) if calibration.bucket_by != "none" else 0
    factor, logit_factor, tolerance = (
        (tensor.double()[bucket] + torch.zeros(swaps.num, dtype=torch.float64))
        for tensor in (calibration.embedding_factors, calibration.logit_factors, calibration.tolerances)
    )
    bound = lts_bound(
        torch.tensor(swaps.distance),
        torch.tensor(swaps.margin),
        embedding_factor=factor,
        logit_factor=logit_factor,
    )
    return bound.numpy(), tolerance.numpy()


def upper_quantile(values: np.ndarray, recipe: LtsRecipe) -> float:
    """The (1 - delta) quantile of a sample: the smallest value that at most a share delta of the sample exceeds.

    With a confidence, the order statistic that lies above the distribution's own quantile at least that surely, which
    is the inverse of the Clopper-Pearson limit on the share above it.

    Raises:
        SpecError: a sample too small for that.
    """
    num, level = len(values), 1 - recipe.delta
    rank = int(np.ceil(num * level - 1e-9))
    if recipe.confidence is not None:
        # Below the quantile lie at most rank - 1 values, with probability P(Binomial(num, level) <= rank - 1).
        rank = int(binom.ppf(recipe.confidence, num, level)) + 1
    if not 1 <= rank <= num:
        needed = "" if recipe.confidence is None else f" at confidence {recipe.confidence}"
        raise SpecError(f"{num} positions are too few for the {level:.3g} quantile{needed}; use more prompts")
    return float(np.sort(values)[rank - 1])


def _ratio(divergence: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Divergence over raw score; a raw score of 0 cannot bound anything but 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(raw > 0, divergence / raw, np.where(divergence > 0, np.inf, 0.0))


def _values(swaps: Swaps, bucket_by: str) -> np.ndarray:
    return swaps.entropy if bucket_by == "none" else getattr(swaps, bucket_by)


def _edges(swaps: Swaps, recipe: LtsRecipe) -> list[float]:
    if recipe.bucket_by == "none" or recipe.num_buckets == 1:
        return []
    shares = np.arange(1, recipe.num_buckets) / recipe.num_buckets
    return sorted(set(np.quantile(_values(swaps, recipe.bucket_by), shares).tolist()))
