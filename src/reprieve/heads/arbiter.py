"""Trained arbiter as an artefact: adapters, separator, head, and the pair they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from reprieve.errors import require_range, require_whole
from reprieve.heads.artefact import Artefact, register_head
from reprieve.heads.settings import ArbiterShape, FeatureRecipe
from reprieve.settings import MAX_DRAFT_TOKENS
from reprieve.types import Evidence, Need

# Values from verification for each drafted token: both models' last states, entropies and probabilities.
READINGS = FeatureRecipe(states="both", entropy=True, probability=True, draft_scalars=True)
_SMALLEST = 1e-30  # so that lambda = 1 accepts nothing even if 1 - pi rounds to 0


@register_head
@dataclass(frozen=True)
class Arbiter(Artefact):
    """Trained arbiter.

    Args:
        tensors: adapters, separator and head, by name, float32.
        shape: of the adapters.
        pair: pair whose decisions it learned; it is built on the draft's weights.
        task: task it was trained on; use on another task triggers a warning.
        threshold: the recommended lambda.
        num_draft_tokens: K it was trained at.
        training: settings and results of the training.
    """

    kind: ClassVar[str] = "arbiter"
    purpose: ClassVar[str] = (
        "Chooses between the draft's and the target's token at every mismatch (CoSpec): adapters on the draft's own "
        "weights."
    )

    tensors: Mapping[str, Tensor]
    shape: ArbiterShape
    threshold: float
    num_draft_tokens: int
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0)
        require_whole("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        self.require_numbers()

    def risk(self, evidence: Evidence) -> Tensor:
        """Return 1 - pi(accept) of each drafted token, [...], from the advisor's forward."""
        assert evidence.advice is not None, "an arbiter needs an advisor: reprieve.models.arbiter.make_advisor"
        risk = 1.0 - evidence.advice
        return risk.nextafter(torch.full_like(risk, 2.0)).clamp_min(_SMALLEST)  # pi = lambda is refused (Eq. 17)

    def to(self, device: Any) -> Self:
        """Return itself: the weights move when the network is built on the draft."""
        return self

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs besides the tokens of a round."""
        return READINGS.needs if self.shape.num_readings else frozenset()

    @property
    def reads_draft(self) -> bool:
        return True

    def facts(self) -> dict[str, str]:
        facts = {"recommended lambda": f"{self.threshold:g}", "K": str(self.num_draft_tokens)}
        return facts | ({"reads": READINGS.name} if self.shape.num_readings else {})
