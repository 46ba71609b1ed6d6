"""What ARC-Decode's acceptance rule measures once per target: whitening, two factors and a tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from reprieve.errors import ReprieveError, SpecError, require_choice
from reprieve.heads.artefact import fingerprint_of, load_artefact, save_artefact
from reprieve.heads.binding import PairIdentity
from reprieve.rules.distributions import entropy
from reprieve.rules.lts import lts_bound, raw_scores
from reprieve.types import Evidence

BUCKETS = ("none", "entropy", "distance", "margin")
_KEYS = frozenset({"pair", "task", "delta", "bucket_by", "settings"})


@dataclass(frozen=True)
class LtsCalibration:
    """Constants of the bound U, by bucket (ARC-Decode, Algorithm 1 and appendix A.1, corollary i).

    Args:
        scale: [D], the diagonal of the whitening W.
        embedding_factors: [B], c' of each bucket; `logit_factors` alpha * kappa; `tolerances` tau_delta, nats.
        edges: [B - 1], rising: where one bucket ends and the next begins.
        bucket_by: `none`, the `entropy` of the target's distribution (nats), the whitened embedding `distance`, or
            the `margin` of log-probabilities (both squared).
        pair: whose embeddings and distributions they are; only the target and the tokenizer matter.
        task: what was decoded to measure them. The paper holds them to be the target's alone; `reprieve audit lts`
            tells what another task makes of them.
        delta: the share of calibration positions that the bound may miss.
        settings: how it was made, and what it covered.
    """

    kind: ClassVar[str] = "lts"

    scale: Tensor
    embedding_factors: Tensor
    logit_factors: Tensor
    tolerances: Tensor
    edges: Tensor
    pair: PairIdentity
    task: str
    delta: float
    bucket_by: str = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("bucket_by", self.bucket_by, BUCKETS)
        num = len(self.edges) + 1
        for name in ("embedding_factors", "logit_factors", "tolerances"):
            values = getattr(self, name)
            if values.shape != (num,) or not bool((values.isfinite() & (values > 0)).all()):
                raise SpecError(f"{name} must be {num} positive numbers, got {values.tolist()}")
        if not bool(self.scale.isfinite().all()):
            raise SpecError("scale must be finite")

    @property
    def num_features(self) -> int:
        """D, the size of the embeddings it reads."""
        return len(self.scale)

    def features_of(self, hidden_size: int) -> int:
        """How large the embeddings of a target of this hidden size are."""
        return hidden_size

    def bound(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """U and tau_delta of each drafted token, nats: [...] each.

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
            distance,
            margin,
            embedding_factor=self.embedding_factors[bucket],
            logit_factor=self.logit_factors[bucket],
        )
        return bound, self.tolerances[bucket]

    def bucket_of(self, distance: Tensor, margin: Tensor, target_probs: Tensor) -> Tensor:
        """Which bucket each token falls into, [...], int64."""
        if self.bucket_by == "none":
            return torch.zeros(distance.shape, dtype=torch.long, device=distance.device)
        values = {"distance": distance, "margin": margin}.get(self.bucket_by)
        return torch.bucketize((entropy(target_probs) if values is None else values).contiguous(), self.edges)

    def risk(self, evidence: Evidence) -> Tensor:
        """U / tau_delta of each drafted token, [...]; 1 - LTS."""
        bound, tolerance = self.bound(evidence)
        return bound / tolerance

    def to(self, device: Any) -> Self:
        """A copy on a device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        return dataclasses.replace(self, **moved)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        names = ("scale", "embedding_factors", "logit_factors", "tolerances", "edges")
        return {name: getattr(self, name) for name in names}

    @property
    def fingerprint(self) -> str:
        """Identifies its numbers: runs of another calibration are not mixed with those of this one."""
        return fingerprint_of(self._tensors)

    def require_pair(self, pair: PairIdentity, name: str) -> None:
        """Refuse another target than the one it was made for.

        Raises:
            PairError: names both.
        """
        self.pair.require_matches(pair, f"calibration {name!r}", reads_draft=False)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`.

        Raises:
            ReprieveError: the folder cannot be written, or holds something else.
        """
        config = {
            "pair": dataclasses.asdict(self.pair),
            "task": self.task,
            "delta": self.delta,
            "bucket_by": self.bucket_by,
            "settings": dict(self.settings),
        }
        save_artefact(Path(folder), self.kind, config, self._tensors)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> Self:
        """Load from a folder or a hub id.

        Raises:
            ReprieveError: not found, of another kind, or tampered with.
        """
        config, tensors = load_artefact(source, (cls.kind,), _KEYS)
        del config["kind"]
        try:
            return cls(**{**config, **tensors, "pair": PairIdentity(**config["pair"])})
        except (TypeError, ValueError, KeyError) as error:
            raise ReprieveError(f"calibration {str(source)!r}: {error}") from None
