"""Calibration of the Local Tolerance Score: ARC-Decode's Algorithm 1, with buckets and a finite-sample correction.

Each sample is a position of the target's own answers, where another candidate replaces its most likely token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprieve.engine import Pair
from reprieve.errors import SpecError, import_extra
from reprieve.heads.lts import LtsCalibration
from reprieve.models.sampling import Sampler
from reprieve.rules.lts import lts_bound
from reprieve.settings import SamplingParams
from reprieve.training.settings import LtsRecipe
from reprieve.training.swaps import SwapMeter, Swaps


def collect_swaps(
    pair: Pair,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    recipe: LtsRecipe,
    params: SamplingParams,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, Swaps]:
    """Compute the whitening and one candidate for every position of the answers (Algorithm 1, lines 1 to 10).

    Args:
        texts: tokens of each prompt and of the target's answer to it.
        params: sampling parameters of the answers.
    """
    target = pair.cached_target()
    meter = SwapMeter(target, Sampler(params, pair.device), top_k=recipe.active)
    generator = torch.Generator().manual_seed(recipe.seed)
    draft = pair.cached_draft() if recipe.candidates == "drafted" else None
    parts = []
    for number, (prompt_ids, answer_ids) in enumerate(texts):
        if answer_ids:
            if draft is None:
                candidates = meter.draw_candidates(prompt_ids, answer_ids, generator)
            else:
                candidates = meter.drafted_candidates(draft, prompt_ids, answer_ids)
            parts.append(meter.measure(prompt_ids, answer_ids, *candidates))
        progress(number + 1, len(texts))
    if not any(part.num for part in parts):
        raise SpecError("calibration needs positions with a candidate other than the most likely token, got none")
    return meter.scale, Swaps.join(parts)


def fit(pair: Pair, task: str, scale: Tensor, swaps: Swaps, recipe: LtsRecipe, **settings: Any) -> LtsCalibration:
    """Fit the constants in each bucket (Algorithm 1, lines 11 to 14).

    Raises:
        SpecError: too few samples for the quantile, or for its limit at the requested confidence.
    """
    edges = _edges(swaps, recipe)
    constants = []
    buckets = np.searchsorted(edges, _values(swaps, recipe.bucket_by)) if len(edges) else np.zeros(swaps.num, int)
    for bucket in range(len(edges) + 1):
        inside = buckets == bucket
        divergence, distance, margin = (values[inside] for values in (swaps.divergence, swaps.distance, swaps.margin))
        _require_enough(len(divergence), recipe, where=f" in bucket {bucket}" if len(edges) else "")
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
    """Return U and tau_delta of each swap, nats: [n] each."""
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
    """Return the (1 - delta) quantile of a sample: the smallest value exceeded by at most a share delta of it.

    With a confidence, return the order statistic that exceeds the distribution's quantile with at least that
    confidence, the inverse of the Clopper-Pearson limit on the share above it.

    Raises:
        SpecError: the sample is too small.
    """
    _require_enough(len(values), recipe)
    return float(np.sort(values)[_rank(len(values), recipe) - 1])


def _rank(num: int, recipe: LtsRecipe) -> int:
    """Return the rank, from 1, of the order statistic for the quantile."""
    level = 1 - recipe.delta
    if recipe.confidence is None:
        return int(np.ceil(num * level - 1e-9))
    # At most rank - 1 values lie below the quantile, with probability P(Binomial(num, level) <= rank - 1).
    binom = import_extra("scipy.stats", "evidence").binom
    return int(binom.ppf(recipe.confidence, num, level)) + 1


def _require_enough(num: int, recipe: LtsRecipe, *, where: str = "") -> None:
    if num < 1 or _rank(num, recipe) > num:
        at = "" if recipe.confidence is None else f" at confidence {recipe.confidence}"
        reason = f"{num} positions{where} are too few for the {1 - recipe.delta:.3g} quantile{at}"
        raise SpecError(f"{reason}; use more prompts or fewer buckets")


def _ratio(divergence: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Return divergence over raw score; a raw score of 0 can only bound a divergence of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(raw > 0, divergence / raw, np.where(divergence > 0, np.inf, 0.0))


def _values(swaps: Swaps, bucket_by: str) -> np.ndarray:
    return swaps.entropy if bucket_by == "none" else getattr(swaps, bucket_by)


def _edges(swaps: Swaps, recipe: LtsRecipe) -> list[float]:
    if recipe.bucket_by == "none" or recipe.buckets == 1:
        return []
    shares = np.arange(1, recipe.buckets) / recipe.buckets
    values = _values(swaps, recipe.bucket_by)
    edges = set(np.quantile(values, shares).tolist())
    return sorted(edge for edge in edges if values.min() <= edge < values.max())  # no bucket is empty
