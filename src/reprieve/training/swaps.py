"""Measured effect of a token swap on the target's next step.

One forward over an answer reads all swaps, as leaves of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reprieve.models.cached_model import CachedModel, ResponseTree
from reprieve.models.sampling import Sampler
from reprieve.rules.distributions import entropy, js_divergence
from reprieve.rules.fuzzy import top_k_union
from reprieve.rules.lts import raw_scores
from reprieve.types import Evidence

_MAX_LEAVES = 128  # per forward; the tree's mask grows quadratically


@dataclass(frozen=True)
class Swaps:
    """Swapped tokens and their effect on the next step: [n] each, float64."""

    divergence: np.ndarray  # JS of the two next-step distributions on their top-k union, nats
    distance: np.ndarray  # squared distance between the whitened embeddings
    margin: np.ndarray  # squared difference of the log-probabilities
    entropy: np.ndarray  # of the target's distribution, nats

    @classmethod
    def none(cls) -> Swaps:
        return cls(*(np.empty(0) for _ in range(4)))

    @classmethod
    def join(cls, parts: Sequence[Swaps]) -> Swaps:
        names = ("divergence", "distance", "margin", "entropy")
        return cls(**{name: np.concatenate([getattr(part, name) for part in (*parts, cls.none())]) for name in names})

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
        self,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        positions: Sequence[int],
        token_ids: Sequence[int],
    ) -> Swaps:
        """Measure the effect of each token at its position, compared with the target's most likely token.

        Args:
            positions: in the answer, one for each of `token_ids`.
        """
        chunks = range(0, len(positions), _MAX_LEAVES)
        return Swaps.join(
            [
                self._measure(
                    prompt_ids, answer_ids, positions[at : at + _MAX_LEAVES], token_ids[at : at + _MAX_LEAVES]
                )
                for at in chunks
            ]
        )

    def _judging(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """Return the target's logits for every position of an answer and the next one: [len(answer_ids) + 1, V]."""
        self.target.start(list(prompt_ids[:-1]), reuse_prefix=True)
        logits, _ = self.target.forward([prompt_ids[-1], *answer_ids])
        return logits

    def _measure(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]
    ) -> Swaps:
        judging = self._judging(prompt_ids, answer_ids[: max(positions)])[list(positions)]
        top_ids = judging.argmax(-1).tolist()
        tree = ResponseTree(answer_ids[: max(positions) + 1])
        for position, token_id, top_id in zip(positions, token_ids, top_ids, strict=True):
            tree.add(position, token_id)
            tree.add(position, top_id)
        logits, _ = tree.read(self.target, prompt_ids)
        rows = [tree.row(position, token_id) for position, token_id in zip(positions, token_ids, strict=True)]
        top_rows = [tree.row(position, top_id) for position, top_id in zip(positions, top_ids, strict=True)]
        evidence = self._evidence(judging, torch.tensor(list(token_ids), device=judging.device))
        distance, margin = raw_scores(evidence, self.scale)
        divergence = next_step_divergence(logits[rows], logits[top_rows], k=self.top_k)
        measured = (divergence, distance, margin, entropy(evidence.target_probs))
        return Swaps(*(values.double().cpu().numpy() for values in measured))

    def _evidence(self, logits: Tensor, token_ids: Tensor) -> Evidence:
        scores = self.sampler.target_scores(logits)
        return Evidence(
            token_ids=token_ids,
            target_logits=logits,
            greedy=self.sampler.greedy,
            lossless_accepts=torch.zeros_like(token_ids, dtype=torch.bool),
            target_scores=None if self.sampler.greedy else scores,
            token_embeddings=self.target.embed(token_ids),
            top_embeddings=self.target.embed(scores.argmax(-1)),
        )
