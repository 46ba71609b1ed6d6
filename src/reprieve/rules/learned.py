"""Base classes of rules that use a trained head or a calibration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from reprieve.errors import require_range
from reprieve.rules.base import Dial, Rule, Traits
from reprieve.types import Evidence


@dataclass(frozen=True)
class HeadRule(Rule):
    """Base class of rules that use a head or a calibration, loaded from `path`.

    Args:
        path: folder or hub id of the head; the bundled head by default on the bundled pair.
        head: the loaded head (`reprieve.heads.loading.attach_heads`).
        source: path that the head was loaded from; empty for a head in memory.
    """

    head_kind: ClassVar[str]
    made_by: ClassVar[str]  # the command that trains one

    path: str = ""
    head: Any = field(default=None, compare=False, repr=False, kw_only=True, metadata={"spec": False})
    source: str = field(default="", compare=False, repr=False, kw_only=True, metadata={"spec": False})

    @classmethod
    def of(cls, head: Any, **parameters: Any) -> Self:
        """Return a rule with a head in memory."""
        return cls(**parameters).with_head(head)

    def to(self, device: Any) -> Self:
        return self if self.head is None else dataclasses.replace(self, head=self.head.to(device))

    def with_head(self, head: Any) -> Self:
        """Return the rule with a head in memory; the head's recommendation is used if the dial is not set."""
        rule = dataclasses.replace(self, head=head)
        return rule.with_dial(head.threshold) if self.dial is not None and self.dial_value is None else rule

    @property
    def heads(self) -> tuple[tuple[str, Any], ...]:
        return () if self.head is None else ((self.source or self.head_kind, self.head),)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the head's risk of each drafted token, [...]."""
        assert self.head is not None, "attach the rule's head first (reprieve.heads.loading.attach_heads)"
        risk: Tensor = self.head.risk(evidence)
        return risk


@dataclass(frozen=True)
class LearnedRule(HeadRule):
    """Score tokens that the lossless check would reject with a head; accept those with low enough risk.

    Args:
        path: folder or hub id of the head.
        threshold: largest accepted P(important), 0 to 1; 0 is lossless. None uses the certified threshold of
            a bundled head that has a certificate, else the threshold that the head recommends.

    A head judges what a token says, not its probability: tokens that top-k or top-p cut off can be rescued too.
    """

    own_dial: ClassVar[Dial | None] = Dial(
        "threshold", strictest=0.0, stops=(0.0, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)
    )

    own_traits: ClassVar[Traits] = Traits(beyond_truncation=True)

    threshold: float | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0, optional=True)

    def with_head(self, head: Any) -> Self:
        """Return the rule with a head in memory.

        Raises:
            SpecError: the head needs features that are not available during decoding.
        """
        head.recipe.require_decodable()
        return super().with_head(head)

    @property
    def traits(self) -> Traits:
        """Traits from the head's recipe; its inputs are unknown until the head is loaded."""
        if self.head is None:
            return self.own_traits
        recipe = self.head.recipe
        return dataclasses.replace(
            self.own_traits,
            needs=recipe.needs,
            target_layers=recipe.layers if recipe.reads_target else (),
            draft_layers=recipe.draft_layers if recipe.reads_draft else (),
        )
