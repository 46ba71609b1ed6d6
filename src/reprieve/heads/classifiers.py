"""Trained heads that classify drafted tokens, each with weights and a recommended threshold.

Linear heads of AutoJudge and Judge Decoding, PAD's two-branch MLP, the state arbiter's two linear heads, and CoSpec's
arbiter, which is not a `Head`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from reprieve.errors import SpecError, require_range, require_whole
from reprieve.heads.artefact import Artefact, register_head
from reprieve.heads.features import TokenStates, assemble
from reprieve.heads.settings import ArbiterShape, FeatureRecipe
from reprieve.settings import MAX_DRAFT_TOKENS
from reprieve.types import Evidence, Need

_PIVOT_LAYERS = ("hidden", "scalars", "fuse", "out")  # of PAD's classifier
NEUTRAL = 0.5  # risk of an arbiter: the draft's side is as likely to end better as worse
_SMALLEST = 1e-30  # a risk: a sigmoid underflows to 0, which a threshold of 0 would accept


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
        return int(self.tensors["weight"].shape[-1])

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
        if "acceptance_at_threshold" in self.training:
            refused, accepted = (self.training[f"{name}_at_threshold"] for name in ("recall", "acceptance"))
            facts["at the threshold"] = f"refuses {refused:.0%} of the important, accepts {accepted:.0%} of the others"
        return facts

    def _tensor(self, name: str, *shape: int) -> Tensor:
        """Return a weight by name; -1 stands for any size."""
        tensor = self.tensors.get(name)
        if (
            tensor is not None
            and tensor.ndim == len(shape)
            and all(want in (-1, have) for want, have in zip(shape, tensor.shape, strict=True))
        ):
            return tensor
        got = "nothing" if tensor is None else list(tensor.shape)
        raise SpecError(f"the {self.kind} head's {name} must have shape {list(shape)}, got {got}")


def auc_text(values: Sequence[float]) -> str:
    """Format a ROC AUC and its 95% interval for model cards and commands."""
    auc, low, high = values
    return f"{auc:.3f} [{low:.3f}, {high:.3f}]"


@register_head
class JudgeHead(Head):
    """Linear head: one product with states that the target has computed anyway.

    Tensors: `weight` [F] and `bias` [], with the standardisation of the features folded in.
    """

    kind: ClassVar[str] = "judge"
    purpose: ClassVar[str] = (
        "Predicts which drafted tokens would change the answer, with a linear head on hidden states that the target "
        "computes anyway (AutoJudge). Reprieve rescues the others."
    )

    def check_shapes(self) -> None:
        self._tensor("weight", -1)
        self._tensor("bias")

    def probability(self, features: Tensor) -> Tensor:
        """Return P(important) for features [..., F]: [...] (AutoJudge, section 3.2)."""
        return torch.sigmoid(features @ self.tensors["weight"] + self.tensors["bias"])


def pivot_logits(
    features: Tensor,  # [..., F]: hidden states, then entropy and probability
    tensors: Mapping[str, Tensor],
) -> Tensor:  # [..., 2]: non-pivot, pivot
    """Return the two logits of PAD's classifier (PAD, appendix B).

    u = relu(hidden), v = relu(scalars), z = out(relu(fuse(u concat v))); features are standardised first.
    """
    standard = (features - tensors["mean"]) / tensors["scale"]
    size = tensors["hidden.weight"].shape[1]
    u = relu(linear(standard[..., :size], tensors["hidden.weight"], tensors["hidden.bias"]))
    v = relu(linear(standard[..., size:], tensors["scalars.weight"], tensors["scalars.bias"]))
    fused = relu(linear(torch.cat([u, v], dim=-1), tensors["fuse.weight"], tensors["fuse.bias"]))
    return linear(fused, tensors["out.weight"], tensors["out.bias"])


@register_head
class PivotHead(Head):
    """Small MLP. Tensors: `mean` and `scale` [F], and weight and bias of `hidden`, `scalars`, `fuse` and `out`."""

    kind: ClassVar[str] = "pivot"
    purpose: ClassVar[str] = (
        "Predicts pivots, which are drafted tokens after which fewer continuations are correct, from the target's "
        "state, entropy and probability (PAD). Reprieve rescues the others."
    )

    def check_shapes(self) -> None:
        if self.recipe.num_scalars != 2:
            raise SpecError("the pivot head reads entropy and probability; its recipe must have both")
        hidden, scalars = self._tensor("hidden.weight", -1, -1), self._tensor("scalars.weight", -1, 2)
        fuse = self._tensor("fuse.weight", -1, hidden.shape[0] + scalars.shape[0])
        self._tensor("out.weight", 2, fuse.shape[0])
        for name in ("mean", "scale"):
            self._tensor(name, hidden.shape[1] + 2)
        for layer in _PIVOT_LAYERS:
            self._tensor(f"{layer}.bias", self._tensor(f"{layer}.weight", -1, -1).shape[0])

    @property
    def num_features(self) -> int:
        return int(self.tensors["mean"].shape[0])

    def probability(self, features: Tensor) -> Tensor:
        """Return P(pivot), the softmax of `pivot_logits`: [..., F] to [...]."""
        return pivot_logits(features, self.tensors).softmax(-1)[..., 1]


@register_head
class StateArbiter(Head):
    """Two linear heads: P(worse) and P(better), for the answer after the draft's token compared with the target's.

    Tensors: `weight` [2, F] and `bias` [2], with the standardisation of the features folded in.
    """

    kind: ClassVar[str] = "state_arbiter"
    purpose: ClassVar[str] = (
        "Weighs whether a drafted token leads to a better or a worse answer than the target's own, from states and "
        "distributions that both models have computed anyway. Reprieve takes the better side of a mismatch."
    )

    def facts(self) -> dict[str, str]:
        facts = super().facts()
        for name in ("worse", "better"):
            if name in self.training:
                number, auc = self.training[name]["num"], auc_text(self.training[name]["auc_held_out"])
                facts[f"the draft's side {name}"] = f"in {number}; held-out ROC AUC {auc}"
        return facts

    def check_shapes(self) -> None:
        self._tensor("weight", 2, -1)
        self._tensor("bias", 2)

    def probability(self, features: Tensor) -> Tensor:
        """Return (1 + P(worse) - P(better)) / 2 for features [..., F]: [...]; 1/2 if neither is more likely."""
        worse, better = torch.sigmoid(features @ self.tensors["weight"].T + self.tensors["bias"]).unbind(-1)
        return (1 + worse - better) / 2


# Values from verification for each drafted token: both models' last states, entropies and probabilities.
READINGS = FeatureRecipe(states="both", entropy=True, probability=True, draft_scalars=True)


@register_head
@dataclass(frozen=True)
class Arbiter(Artefact):
    """CoSpec's arbiter: adapters on the draft's weights.

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
