"""Base class of trained classifiers of drafted tokens: a feature recipe and a recommended threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from reprieve.errors import SpecError, require_range
from reprieve.heads.artefact import Artefact
from reprieve.heads.features import TokenStates, assemble
from reprieve.heads.settings import FeatureRecipe
from reprieve.types import Evidence

_SMALLEST = 1e-30  # a sigmoid underflows to 0


@dataclass(frozen=True)
class Head(Artefact):
    """Trained classifier of drafted tokens.

    Args:
        tensors: its weights, by name, float32.
        recipe: its features.
        pair: pair whose states it was trained on; use with another pair raises an error.
        task: task its labels were mined on; use on another task triggers a warning.
        threshold: recommended threshold, in the unit of its risk.
        training: settings of the training and results on held-out problems.
        drafter: whose tokens it was trained on: draft, or eagle3 and the fingerprint of its head.
    """

    tensors: Mapping[str, Tensor]
    recipe: FeatureRecipe
    threshold: float
    training: Mapping[str, Any] = field(default_factory=dict)
    drafter: str = field(default="draft", kw_only=True)

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0)
        self.require_numbers()
        self.check_shapes()

    def check_shapes(self) -> None:
        """Refuse weights of inconsistent shapes.

        Raises:
            SpecError: names the tensor.
        """
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """F, the number of its features."""
        raise NotImplementedError

    def features_of(self, hidden_size: int) -> int:
        """Return the number of features from a target of this hidden size."""
        recipe = self.recipe
        return hidden_size * len(recipe.layers) * recipe.reads_target + recipe.num_scalars

    def probability(self, features: Tensor) -> Tensor:
        """Return P(important) for features [..., F]: [...]."""
        raise NotImplementedError

    def risk(self, evidence: Evidence) -> Tensor:
        """Return P(important) of each drafted token of a round, [...]; above 0, so that threshold 0 accepts nothing.

        Raises:
            SpecError: the models' states are not of the size it was trained on.
        """
        features = assemble(self.recipe, TokenStates.of(evidence, self.recipe))
        if features.shape[-1] != self.num_features:
            raise SpecError(
                f"the {self.kind} head reads {self.num_features} features, these models give {features.shape[-1]}"
            )
        return self.probability(features).clamp_min(_SMALLEST)

    @property
    def reads_draft(self) -> bool:
        return self.recipe.reads_draft

    def facts(self) -> dict[str, str]:
        facts = {"recommended threshold": f"{self.threshold:g}", "features": self.recipe.name}
        if "auc_held_out" in self.training:
            facts["held-out ROC AUC"] = auc_text(self.training["auc_held_out"])
        if "num_important" in self.training:
            facts["labels"] = (
                f"{self.training['num_tokens']} of {self.training['num_problems']} problems, "
                f"{self.training['num_important']} important"
            )
        return facts

    def _tensor(self, name: str, *shape: int) -> Tensor:
        """Return a weight by name; -1 stands for any size.

        Raises:
            SpecError: it is missing or has another shape.
        """
        tensor = self.tensors.get(name)
        fits = tensor is not None and len(tensor.shape) == len(shape)
        if not fits or any(want not in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)):  # type: ignore[union-attr]
            got = "nothing" if tensor is None else list(tensor.shape)
            raise SpecError(f"the {self.kind} head's {name} must have shape {list(shape)}, got {got}")
        assert tensor is not None
        return tensor


def auc_text(values: Sequence[float]) -> str:
    """Format a ROC AUC and its 95% interval for model cards and commands."""
    auc, low, high = values
    return f"{auc:.3f} [{low:.3f}, {high:.3f}]"
