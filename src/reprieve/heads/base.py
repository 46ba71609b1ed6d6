"""What all heads have: a recipe, what they were made for, and one file format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from reprieve.errors import ReprieveError, SpecError, require_range
from reprieve.heads.artefact import fingerprint_of, load_artefact, save_artefact
from reprieve.heads.binding import PairIdentity
from reprieve.heads.features import FeatureRecipe, TokenStates, assemble
from reprieve.types import Evidence

_SMALLEST = 1e-30  # a sigmoid underflows to 0
_KEYS = frozenset({"recipe", "pair", "task", "threshold", "training"})


@dataclass(frozen=True)
class Head:
    """A trained classifier of drafted tokens.

    Args:
        tensors: its weights, by name, float32.
        recipe: what its features are.
        pair: whose states they were; loading it beside another pair is an error.
        task: what it was mined on; use on another is a warning.
        threshold: recommended, in the unit of its risk.
        training: how it was trained and what it reached on held-out problems.
    """

    kind: ClassVar[str]

    tensors: Mapping[str, Tensor]
    recipe: FeatureRecipe
    pair: PairIdentity
    task: str
    threshold: float
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_range("threshold", self.threshold, 0.0, 1.0)
        if any(not bool(tensor.isfinite().all()) for tensor in self.tensors.values()):
            raise SpecError(f"the {self.kind} head's weights must be finite")
        self.check_shapes()

    def check_shapes(self) -> None:
        """Refuse weights that do not fit together.

        Raises:
            SpecError: names the tensor.
        """
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """F, the length of what it reads."""
        raise NotImplementedError

    def features_of(self, hidden_size: int) -> int:
        """How many features a target of this hidden size gives it."""
        recipe = self.recipe
        return hidden_size * len(recipe.layers) * recipe.reads_target + recipe.num_scalars

    def probability(self, features: Tensor) -> Tensor:
        """P(important) for features [..., F]: [...]."""
        raise NotImplementedError

    def risk(self, evidence: Evidence) -> Tensor:
        """P(important) of each drafted token of a round, [...]; above 0, so that threshold 0 accepts nothing.

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
    def fingerprint(self) -> str:
        """Identifies its weights: runs of a head trained anew are not mixed with those of the old one."""
        return fingerprint_of(self.tensors)

    def to(self, device: Any) -> Self:
        """A copy with its weights on a device."""
        return dataclasses.replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`.

        Raises:
            ReprieveError: the folder cannot be written, or holds something else.
        """
        config = {
            "recipe": self.recipe.to_config(),
            "pair": dataclasses.asdict(self.pair),
            "task": self.task,
            "threshold": self.threshold,
            "training": dict(self.training),
        }
        save_artefact(Path(folder), self.kind, config, self.tensors)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, pair: PairIdentity | None = None) -> Self:
        """Load from a folder or a hub id.

        Args:
            pair: the pair it is to be used with; None defers the check.

        Raises:
            ReprieveError: not found, of another kind, or tampered with.
            PairError: made for another pair.
        """
        config, tensors = load_artefact(source, (cls.kind,), _KEYS)
        try:
            head = cls(
                tensors=tensors,
                recipe=FeatureRecipe.from_config(config["recipe"]),
                pair=PairIdentity(**config["pair"]),
                task=str(config["task"]),
                threshold=float(config["threshold"]),
                training=dict(config["training"]),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ReprieveError(f"head {str(source)!r}: {error}") from None
        if pair is not None:
            head.require_pair(pair, str(source))
        return head

    def require_pair(self, pair: PairIdentity, name: str) -> None:
        """Refuse another pair than the one it was made for.

        Raises:
            PairError: names both pairs.
        """
        self.pair.require_matches(pair, f"head {name!r}", reads_draft=self.recipe.reads_draft)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        """A weight by name; -1 stands for any size.

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
