"""A trained arbiter as a file: the adapters, the separator and the head, and what they were made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from reprieve.errors import ReprieveError, SpecError, require_range
from reprieve.heads.artefact import fingerprint_of, load_artefact, save_artefact
from reprieve.heads.binding import PairIdentity
from reprieve.types import Evidence

_SMALLEST = 1e-30  # so that lambda = 1 accepts nothing, where 1 - pi rounds to 0
_KEYS = frozenset({"shape", "pair", "task", "threshold", "num_draft_tokens", "training"})


@dataclass(frozen=True)
class ArbiterShape:
    """The adapters on the draft's backbone, and the mask (CoSpec, appendix C.1).

    Args:
        rank: of the LoRA adapters; `scale` their alpha; `dropout` on their input while warming up.
        hybrid: bidirectional attention between drafted and target tokens; False for causal (Table 8).
        seed: of the first weights.
    """

    rank: int = 16
    scale: float = 32.0
    dropout: float = 0.05
    hybrid: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SpecError(f"rank must be 1 or more, got {self.rank!r}")
        require_range("scale", self.scale, 0.0, 1e6, low_open=True)
        require_range("dropout", self.dropout, 0.0, 0.9)


@dataclass(frozen=True)
class Arbiter:
    """A trained arbiter.

    Args:
        tensors: adapters, separator and head, by name, float32.
        shape: of the adapters.
        pair: whose decisions it learned; the draft's weights are under it and belong to it.
        task: what it was trained on; use on another is a warning.
        threshold: the recommended lambda.
        num_draft_tokens: K it was trained at.
        training: how it was trained, and what it reached.
    """

    kind: ClassVar[str] = "arbiter"

    tensors: Mapping[str, Tensor]
    shape: ArbiterShape
    pair: PairIdentity
    task: str
    threshold: float
    num_draft_tokens: int
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0)
        if any(not bool(tensor.isfinite().all()) for tensor in self.tensors.values()):
            raise SpecError("the arbiter's weights must be finite")

    def risk(self, evidence: Evidence) -> Tensor:
        """1 - pi(accept) of each drafted token, [...], from the advisor's forward over the round."""
        assert evidence.advice is not None, "an arbiter needs an advisor: reprieve.engine.arbitration.make_advisor"
        risk = 1.0 - evidence.advice
        return risk.nextafter(torch.full_like(risk, 2.0)).clamp_min(_SMALLEST)  # pi = lambda is refused (Eq. 17)

    def to(self, device: Any) -> Self:
        """Itself: the weights move when the network is built beside the draft."""
        return self

    @property
    def fingerprint(self) -> str:
        """Identifies its weights: runs of another arbiter are not mixed with those of this one."""
        return fingerprint_of(self.tensors)

    def require_pair(self, pair: PairIdentity, name: str) -> None:
        """Refuse another pair than the one it was trained on.

        Raises:
            PairError: names both.
        """
        self.pair.require_matches(pair, f"arbiter {name!r}", reads_draft=True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`.

        Raises:
            ReprieveError: the folder cannot be written, or holds something else.
        """
        config = {
            "shape": dataclasses.asdict(self.shape),
            "pair": dataclasses.asdict(self.pair),
            "task": self.task,
            "threshold": self.threshold,
            "num_draft_tokens": self.num_draft_tokens,
            "training": dict(self.training),
        }
        save_artefact(Path(folder), self.kind, config, self.tensors)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> Self:
        """Load from a folder or a hub id.

        Raises:
            ReprieveError: not found, of another kind, or tampered with.
        """
        config, tensors = load_artefact(source, (cls.kind,), _KEYS)
        del config["kind"]
        try:
            shape, pair = ArbiterShape(**config.pop("shape")), PairIdentity(**config.pop("pair"))
            return cls(tensors=tensors, shape=shape, pair=pair, **config)
        except (TypeError, ValueError, KeyError) as error:
            raise ReprieveError(f"arbiter {str(source)!r}: {error}") from None
