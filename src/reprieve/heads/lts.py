"""Calibration of ARC-Decode's acceptance rule, measured once per target: whitening, two factors and a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_choice, require_range
from reprieve.heads.artefact import Artefact, register_head
from reprieve.heads.settings import BUCKETS
from reprieve.rules.distributions import entropy
from reprieve.rules.lts import lts_bound, raw_scores
from reprieve.types import Evidence


@register_head
@dataclass(frozen=True)
class LtsCalibration(Artefact):
    """Constants of the bound U, by bucket (ARC-Decode, Algorithm 1 and appendix A.1, corollary i).

    Args:
        scale: [D], the diagonal of the whitening W.
        embedding_factors: [B], c' of each bucket; `logit_factors` alpha * kappa; `tolerances` tau_delta, nats.
        edges: [B - 1], rising boundaries between buckets.
        bucket_by: `none`, the `entropy` of the target's distribution (nats), the whitened embedding `distance`, or
            the `margin` of log-probabilities (both squared).
        pair: pair they were measured on; only the target and the tokenizer matter.
        task: task they were measured on. The paper treats them as constants of the target; `benchmarks/arc_audit.py`
            measures them on another task.
        delta: share of calibration positions that the bound may miss.
        settings: settings and coverage of the calibration.
    """

    kind: ClassVar[str] = "lts"
    purpose: ClassVar[str] = (
        "Constants of ARC-Decode's bound on how much the target's next-token distribution changes when a drafted token "
        "replaces the target's own choice. Reprieve rescues tokens with a small bound."
    )

    scale: Tensor
    embedding_factors: Tensor
    logit_factors: Tensor
    tolerances: Tensor
    edges: Tensor
    delta: float
    bucket_by: str = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("bucket_by", self.bucket_by, BUCKETS)
        require_range("delta", self.delta, 0.0, 0.5, low_open=True)
        self.require_numbers()
        if self.edges.ndim != 1 or not bool((self.edges.diff() > 0).all()):
            raise SpecError(f"edges must be rising numbers, got {self.edges.tolist()}")
        if self.bucket_by == "none" and len(self.edges):
            raise SpecError(f"edges must be empty if bucket_by is none, got {self.edges.tolist()}")
        num = len(self.edges) + 1
        for name in ("embedding_factors", "logit_factors", "tolerances"):
            values = getattr(self, name)
            if values.shape != (num,) or not bool((values > 0).all()):
                raise SpecError(f"{name} must be {num} positive numbers, got {values.tolist()}")
        if self.scale.ndim != 1 or not bool((self.scale >= 0).all()):
            raise SpecError("scale must be a list of numbers of 0 or more")

    @property
    def num_features(self) -> int:
        """D, the size of the target's embeddings."""
        return len(self.scale)

    def facts(self) -> dict[str, str]:
        return {"delta": f"{self.delta:g}", "buckets by": self.bucket_by}

    def bound(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """Return U and tau_delta of each drafted token, nats: [...] each.

        Raises:
            SpecError: the target's embeddings are of another size.
        """
        assert evidence.token_embeddings is not None
        if evidence.token_embeddings.shape[-1] != len(self.scale):
            raise SpecError(
                f"the lts calibration is for embeddings of {len(self.scale)}, this target's have "
                f"{evidence.token_embeddings.shape[-1]}"
            )
        distance, margin = raw_scores(evidence, self.scale)
        bucket = self.bucket_of(distance, margin, evidence.target_probs)
        bound = lts_bound(
            distance, margin, embedding_factor=self.embedding_factors[bucket], logit_factor=self.logit_factors[bucket]
        )
        return bound, self.tolerances[bucket]

    def bucket_of(self, distance: Tensor, margin: Tensor, target_probs: Tensor) -> Tensor:
        """Return the bucket of each token, [...], int64."""
        if self.bucket_by == "none":
            return torch.zeros(distance.shape, dtype=torch.long, device=distance.device)
        values = {"distance": distance, "margin": margin}.get(self.bucket_by)
        return torch.bucketize((entropy(target_probs) if values is None else values).contiguous(), self.edges)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return U / tau_delta of each drafted token, [...]; equal to 1 - LTS."""
        bound, tolerance = self.bound(evidence)
        return bound / tolerance
