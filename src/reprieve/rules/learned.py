"""Rules that something trained or measured stands behind: AutoJudge's judge, PAD's pivot; `lts` is one too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_range
from reprieve.rules.base import Rule
from reprieve.types import Evidence, gather_token


class Recipe(Protocol):
    """What a head reads."""

    layers: tuple[int, ...]
    draft_layers: tuple[int, ...]

    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def reads_target(self) -> bool: ...
    @property
    def reads_draft(self) -> bool: ...
    def require_decodable(self) -> None: ...


class RiskHead(Protocol):
    """A trained classifier; `reprieve.heads` has them."""

    threshold: float

    @property
    def recipe(self) -> Any: ...
    def risk(self, evidence: Evidence) -> Tensor: ...
    def to(self, device: Any) -> RiskHead: ...


@dataclass(frozen=True)
class HeadRule(Rule):
    """A rule that something measured or trained stands behind, named by `path`.

    Args:
        path: folder or hub id of the head.
        head: the head itself, once it is loaded (`reprieve.heads.loading.attach_heads`).
    """

    head_kind: ClassVar[str]
    made_by: ClassVar[str]  # the command that makes one

    path: str = ""
    head: Any = field(default=None, compare=False, repr=False, kw_only=True, metadata={"spec": False})

    def with_heads(self, load: Callable[[str, str], Any]) -> Self:
        """Load the head from `path`, unless it is there.

        Raises:
            SpecError: no path.
        """
        if self.head is not None:
            return self
        if not self.path:
            raise SpecError(f"rule {self.name} needs path=FOLDER, a head from `{self.made_by}`")
        return self._with_head(load(self.head_kind, self.path))

    def to(self, device: Any) -> Self:
        return self if self.head is None else dataclasses.replace(self, head=self.head.to(device))

    def _with_head(self, head: Any) -> Self:
        return dataclasses.replace(self, head=head)

    @property
    def heads(self) -> tuple[tuple[str, Any], ...]:
        return () if self.head is None else ((self.path or self.head_kind, self.head),)

    def risk(self, evidence: Evidence) -> Tensor:
        """What the head says of each drafted token."""
        assert self.head is not None, "attach the rule's head first (reprieve.heads.loading.attach_heads)"
        risk: Tensor = self.head.risk(evidence)
        return risk


@dataclass(frozen=True)
class LearnedRule(HeadRule):
    """Ask a head about tokens the lossless check would reject; accept those of low enough risk.

    Args:
        path: folder or hub id of the head.
        threshold: largest accepted P(important), 0 to 1; 0 is lossless. None takes the head's own recommendation.

    A head judges by what a token says, not by how likely sampling would draw it: tokens that top-k or top-p cut off
    can be rescued too.
    """

    dial: ClassVar[str] = "threshold"
    strictest: ClassVar[float] = 0.0
    beyond_truncation: ClassVar[bool] = True

    threshold: float | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.threshold is not None:
            require_range("threshold", self.threshold, 0.0, 1.0)

    @classmethod
    def of(cls, head: RiskHead, *, threshold: float | None = None) -> Self:
        """The rule of a head in memory; its own threshold when None."""
        return cls(threshold=threshold)._with_head(head)

    def _with_head(self, head: RiskHead) -> Self:
        head.recipe.require_decodable()
        threshold = head.threshold if self.threshold is None else self.threshold
        return dataclasses.replace(self, head=head, threshold=threshold)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self._recipe.needs

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self._recipe.layers if self._recipe.reads_target else ()

    @property
    def draft_layers(self) -> tuple[int, ...]:
        return self._recipe.draft_layers if self._recipe.reads_draft else ()

    @property
    def _recipe(self) -> Recipe:
        assert self.head is not None, "attach the rule's head first (reprieve.heads.loading.attach_heads)"
        recipe: Recipe = self.head.recipe
        return recipe


@dataclass(frozen=True)
class JudgeRule(LearnedRule):
    """Rescue what a linear head on hidden states deems unimportant (AutoJudge, section 3.3; Judge Decoding)."""

    name = "judge"
    head_kind = "judge"
    made_by = "reprieve train judge"


@dataclass(frozen=True)
class PivotRule(LearnedRule):
    """Rescue what an MLP deems no pivot (PAD, section 3.3); `threshold` is the paper's sigma.

    Args:
        floor: tokens of less probability under the target are never rescued, whatever the head says.
    """

    name = "pivot"
    head_kind = "pivot"
    made_by = "reprieve train pivot"

    floor: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("floor", self.floor, 0.0, 1.0)

    def risk(self, evidence: Evidence) -> Tensor:
        """P(pivot); infinite under the floor."""
        probs = gather_token(evidence.target_logits.log_softmax(-1), evidence.token_ids).exp()
        return torch.where(probs < self.floor, math.inf, super().risk(evidence))
