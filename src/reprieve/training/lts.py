"""Calibration of the Local Tolerance Score: ARC-Decode's Algorithm 1, with buckets and a finite-sample correction.

Each sample is a position of the target's own answers, where another candidate replaces its most likely token. One
forward over an answer reads the effects of all its swaps on the next step, as leaves of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprieve.engine import Pair
from reprieve.errors import SpecError, import_extra
from reprieve.heads.lts import LtsCalibration
from reprieve.models.cached_model import CachedModel, ResponseTree
from reprieve.models.sampling import Sampler
from reprieve.rules.distributions import entropy, js_divergence
from reprieve.rules.fuzzy import top_k_union
from reprieve.rules.lts import lts_bound, raw_scores
from reprieve.settings import SamplingParams
from reprieve.training.settings import LtsTraining
from reprieve.types import Evidence, Progress, no_progress

_MAX_LEAVES = 128  # per forward; the tree's mask grows quadratically


@dataclass(frozen=True)
class Swaps:
    """Swapped tokens and their effect on the next step: [n] each, float64."""

    divergence: np.ndarray  # JS of the two next-step distributions on their top-k union, nats
    distance: np.ndarray  # squared distance between the whitened embeddings
    margin: np.ndarray  # squared difference of the log-probabilities
    entropy: np.ndarray  # of the target's distribution, nats

    @classmethod
    def join(cls, parts: Sequence[Swaps]) -> Swaps:
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(np.concatenate([np.empty(0), *column]) for column in columns))

    @property
    def num(self) -> int:
        return len(self.divergence)


def next_step_divergence(logits: Tensor, other: Tensor, *, k: int) -> Tensor:
    """Return the JS divergence [...], nats, of distributions [..., V] on the union of their k most likely tokens."""
    return js_divergence(*top_k_union(logits.softmax(-1), other.softmax(-1), k))


def whitening(embeddings: Tensor) -> Tensor:
    """Return the diagonal of W: the inverse standard deviation of each embedding coordinate; [V, D] to [D]."""
    return 1 / embeddings.detach().float().std(0).clamp_min(1e-6)


class SwapMeter:
    """Measures swaps in answers of one target.

    Args:
        target: model; its cache is overwritten.
        sampler: sampler of the answers; margins use its scores.
        top_k: divergences use the union of both distributions' k most likely tokens; candidates are drawn from the
            target's k most likely.
    """

    def __init__(self, target: CachedModel, sampler: Sampler, *, top_k: int) -> None:
        self.target = target
        self.sampler = sampler
        self.top_k = top_k
        embeddings: Any = target.model.get_input_embeddings()
        self.scale = whitening(embeddings.weight)
        self._judged: tuple[tuple[list[int], list[int]], Tensor] | None = None  # the last prompt and answer, and logits

    @torch.inference_mode()
    def draw_candidates(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], generator: torch.Generator
    ) -> tuple[list[int], list[int]]:
        """Draw one of the target's k most likely tokens, except the first, for every position of an answer (line 5).

        Returns:
            Positions and tokens. Positions where top-k or top-p leave a single token are omitted.
        """
        scores = self.sampler.target_scores(self._judging(prompt_ids, answer_ids[:-1]))
        best = scores.topk(min(self.top_k, scores.shape[-1]), dim=-1)
        likely = best.indices[:, 1:]
        num_likely = (best.values[:, 1:] > -math.inf).sum(-1).cpu()
        drawn = torch.randint(likely.shape[1], (len(likely),), generator=generator)
        if bool((num_likely < likely.shape[1]).any()):  # top-k or top-p truncated some
            fewer = (torch.rand(len(likely), generator=generator) * num_likely).long()
            drawn = torch.where(num_likely < likely.shape[1], fewer, drawn)
        chosen = likely.gather(1, drawn.to(likely.device).unsqueeze(1)).squeeze(1)
        positions = [position for position, num in enumerate(num_likely.tolist()) if num > 0]
        return positions, [int(chosen[position]) for position in positions]

    @torch.inference_mode()
    def drafted_candidates(
        self, draft: CachedModel, prompt_ids: Sequence[int], answer_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the draft's token for every position of an answer where it differs from the target's first choice.

        Args:
            draft: model; its cache is overwritten.
        """
        own = self.sampler.target_scores(self._judging(prompt_ids, answer_ids[:-1])).argmax(-1).tolist()
        draft.start(list(prompt_ids[:-1]), reuse_prefix=True)
        logits, _ = draft.forward([prompt_ids[-1], *answer_ids[:-1]])
        if self.sampler.draft_greedy:
            drafted = logits.argmax(-1).tolist()
        else:
            drafted = self.sampler.draw(self.sampler.draft_scores(logits).softmax(-1)).tolist()
        positions = [
            position for position, (top_id, draft_id) in enumerate(zip(own, drafted, strict=True)) if top_id != draft_id
        ]
        return positions, [int(drafted[position]) for position in positions]

    @torch.inference_mode()
    def measure(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]
    ) -> Swaps:
        """Measure the effect of each token at its position, compared with the target's most likely token.

        Args:
            positions: in the answer, one for each of `token_ids`.
        """
        parts = []
        for at in range(0, len(positions), _MAX_LEAVES):
            chunk = slice(at, at + _MAX_LEAVES)
            parts.append(self._measure(prompt_ids, answer_ids, positions[chunk], token_ids[chunk]))
        return Swaps.join(parts)

    def _judging(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """Return the target's logits for every position of an answer and the next one: [len(answer_ids) + 1, V].

        A forward is only made for another answer than the last one.
        """
        text = list(prompt_ids), list(answer_ids)
        if self._judged is None or self._judged[0] != text:
            self.target.start(list(prompt_ids[:-1]), reuse_prefix=True)
            self._judged = text, self.target.forward([prompt_ids[-1], *answer_ids])[0]
        return self._judged[1]

    def _measure(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]
    ) -> Swaps:
        judging = self._judging(prompt_ids, answer_ids[:-1])[list(positions)]
        top_ids = judging.argmax(-1).tolist()
        tree = ResponseTree(answer_ids[: max(positions) + 1])
        for position, token_id, top_id in zip(positions, token_ids, top_ids, strict=True):
            tree.add(position, token_id)
            tree.add(position, top_id)
        logits, _ = tree.read(self.target, prompt_ids)
        rows = [tree.row(position, token_id) for position, token_id in zip(positions, token_ids, strict=True)]
        top_rows = [tree.row(position, top_id) for position, top_id in zip(positions, top_ids, strict=True)]
        chosen = torch.tensor(list(token_ids), device=judging.device)
        scores = self.sampler.target_scores(judging)
        evidence = Evidence(
            token_ids=chosen,
            target_logits=judging,
            greedy=self.sampler.greedy,
            lossless_accepts=torch.zeros_like(chosen, dtype=torch.bool),
            target_scores=None if self.sampler.greedy else scores,
            token_embeddings=self.target.embed(chosen),
            top_embeddings=self.target.embed(scores.argmax(-1)),
        )
        distance, margin = raw_scores(evidence, self.scale)
        divergence = next_step_divergence(logits[rows], logits[top_rows], k=self.top_k)
        measured = (divergence, distance, margin, entropy(evidence.target_probs))
        return Swaps(*(values.double().cpu().numpy() for values in measured))


def collect_swaps(
    pair: Pair,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    recipe: LtsTraining,
    params: SamplingParams,
    *,
    progress: Progress = no_progress,
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


def fit(pair: Pair, task: str, scale: Tensor, swaps: Swaps, recipe: LtsTraining, **settings: Any) -> LtsCalibration:
    """Fit the constants in each bucket (Algorithm 1, lines 11 to 14).

    Raises:
        SpecError: too few samples for the quantile, or for its limit at the requested confidence.
    """
    edges = _edges(swaps, recipe)
    constants = []
    buckets = np.searchsorted(edges, _values(swaps, recipe.bucket_by))
    for bucket in range(len(edges) + 1):
        inside = buckets == bucket
        divergence, distance, margin = (values[inside] for values in (swaps.divergence, swaps.distance, swaps.margin))
        where = f" in bucket {bucket}" if edges else ""
        factor = upper_quantile(_ratio(divergence, distance), recipe, where=where)
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
    bucket = np.searchsorted(calibration.edges.double().numpy(), _values(swaps, calibration.bucket_by))
    constants = (calibration.embedding_factors, calibration.logit_factors, calibration.tolerances)
    factor, logit_factor, tolerance = (tensor.double()[bucket] for tensor in constants)
    bound = lts_bound(
        torch.tensor(swaps.distance), torch.tensor(swaps.margin), embedding_factor=factor, logit_factor=logit_factor
    )
    return bound.numpy(), tolerance.numpy()


def upper_quantile(values: np.ndarray, recipe: LtsTraining, *, where: str = "") -> float:
    """Return the (1 - delta) quantile of a sample: the smallest value exceeded by at most a share delta of it.

    With a confidence, return the order statistic that exceeds the distribution's quantile with at least that
    confidence, the inverse of the Clopper-Pearson limit on the share above it.

    Args:
        where: origin of the sample, for the error message.

    Raises:
        SpecError: the sample is too small.
    """
    num, level, at = len(values), 1 - recipe.delta, ""
    if recipe.confidence is None:
        rank = int(np.ceil(num * level - 1e-9))
    else:
        # At most rank - 1 values lie below the quantile, with probability P(Binomial(num, level) <= rank - 1).
        binom, at = import_extra("scipy.stats", "evidence").binom, f" at confidence {recipe.confidence}"
        rank = int(binom.ppf(recipe.confidence, num, level)) + 1
    if not 1 <= rank <= num:
        reason = f"{num} positions{where} are too few for the {level:.3g} quantile{at}"
        raise SpecError(f"{reason}; use more prompts or fewer buckets")
    return float(np.sort(values)[rank - 1])


def _ratio(divergence: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Return divergence over raw score; a raw score of 0 can only bound a divergence of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(raw > 0, divergence / raw, np.where(divergence > 0, np.inf, 0.0))


def _values(swaps: Swaps, bucket_by: str) -> np.ndarray:
    return swaps.entropy if bucket_by == "none" else getattr(swaps, bucket_by)


def _edges(swaps: Swaps, recipe: LtsTraining) -> list[float]:
    if recipe.bucket_by == "none" or recipe.buckets == 1:
        return []
    shares = np.arange(1, recipe.buckets) / recipe.buckets
    values = _values(swaps, recipe.bucket_by)
    edges = set(np.quantile(values, shares).tolist())
    return sorted(edge for edge in edges if values.min() <= edge < values.max())  # no bucket is empty
