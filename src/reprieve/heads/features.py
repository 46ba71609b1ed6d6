"""What heads look at: named, versioned recipes over states that verification has computed anyway.

The same function assembles features at training time and while decoding, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_choice
from reprieve.needs import Need
from reprieve.types import Evidence, HiddenStates, gather_token

VERSION = 1
STATES = ("target", "draft", "both")
ENCODINGS = ("draft", "target", "previous", "both")
_AT_DECODING = ("draft", "previous")  # encodings that verification has


@dataclass(frozen=True)
class FeatureRecipe:
    """Which states make a head's features, in this order: target states, draft states, entropy, probability.

    Args:
        states: whose hidden states: target, draft or both.
        encoding: of which token (AutoJudge, appendix B): the drafted one, the target's own, the previous one that
            predicted both, or both of the first two. Decoding has no states of the target's own token.
        layers: of the target, as indices into transformers' `hidden_states`; -1 is the last, after the final norm.
        draft_layers: of the draft.
        entropy: add the entropy of the target's distribution, nats.
        probability: add the target's probability of the drafted token.
        version: of these meanings.

    Distributions here are the model's own: temperature 1, nothing cut off.
    """

    states: str = "target"
    encoding: str = "draft"
    layers: tuple[int, ...] = (-1,)
    draft_layers: tuple[int, ...] = (-1,)
    entropy: bool = False
    probability: bool = False
    version: int = VERSION

    def __post_init__(self) -> None:
        require_choice("states", self.states, STATES)
        require_choice("encoding", self.encoding, ENCODINGS)
        require_choice("version of the feature recipe", self.version, (VERSION,))
        if not self.layers or not self.draft_layers:
            raise SpecError("layers must name at least one layer, got none")

    @property
    def name(self) -> str:
        """For people: `target states of the draft token, layers -1, entropy, probability (v1)`."""
        whose = {"both": "target and draft"}.get(self.states, self.states)
        which = {"both": "draft and target tokens", "previous": "previous token"}.get(
            self.encoding, f"{self.encoding} token"
        )
        layers = self.layers if self.reads_target else self.draft_layers
        extra = [word for word, wanted in (("entropy", self.entropy), ("probability", self.probability)) if wanted]
        return ", ".join([f"{whose} states of the {which}", f"layers {' '.join(map(str, layers))}", *extra]) + (
            f" (v{self.version})"
        )

    @property
    def reads_target(self) -> bool:
        return self.states != "draft"

    @property
    def reads_draft(self) -> bool:
        return self.states != "target"

    @property
    def needs(self) -> frozenset[Need]:
        """What it reads of a round."""
        needed = set()
        if self.reads_target:
            needed.add(Need.PARENT_HIDDEN if self.encoding == "previous" else Need.NODE_HIDDEN)
        if self.reads_draft:
            needed.add(Need.DRAFT_HIDDEN)
        return frozenset(needed)

    @property
    def num_scalars(self) -> int:
        return int(self.entropy) + int(self.probability)

    def require_decodable(self) -> None:
        """Refuse recipes that verification cannot serve.

        Raises:
            SpecError: an encoding of the target's own token, or the draft's states of the previous one.
        """
        if self.encoding not in _AT_DECODING or (self.encoding == "previous" and self.reads_draft):
            raise SpecError(
                f"features with encoding={self.encoding}, states={self.states} do not exist while decoding; a head "
                "that decodes needs encoding=draft, or previous with states=target"
            )

    def to_config(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "layers": list(self.layers), "draft_layers": list(self.draft_layers)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FeatureRecipe:
        """The inverse of `to_config`.

        Raises:
            SpecError: unknown keys, or values out of range.
        """
        known = {"states", "encoding", "layers", "draft_layers", "entropy", "probability", "version"}
        if unknown := config.keys() - known:
            raise SpecError(f"feature recipe has unknown keys {', '.join(sorted(unknown))}")
        layers = {key: tuple(config[key]) for key in ("layers", "draft_layers") if key in config}
        return cls(**{**config, **layers})


JUDGE_TARGET = FeatureRecipe()
JUDGE_BOTH = FeatureRecipe(states="both")
PIVOT = FeatureRecipe(entropy=True, probability=True)


@dataclass(frozen=True)
class TokenStates:
    """Hidden states around n drafted tokens, and two numbers of the target's distribution.

    `target` and `draft` map an encoding (`draft`, `target`, `previous`) to states by layer.
    """

    target: Mapping[str, HiddenStates]  # [n, Dt] a layer
    draft: Mapping[str, HiddenStates]  # [n, Dd] a layer
    entropy: Tensor | None = None  # [n], nats
    probability: Tensor | None = None  # [n]

    @classmethod
    def of(cls, evidence: Evidence, recipe: FeatureRecipe) -> TokenStates:
        """What a round's verification offers a recipe."""
        target, draft = {}, {}
        if evidence.node_hidden is not None:
            target["draft"] = evidence.node_hidden
        if evidence.parent_hidden is not None:
            target["previous"] = evidence.parent_hidden
        if evidence.draft_hidden is not None:
            draft["draft"] = evidence.draft_hidden
        entropy, probability = None, None
        if recipe.num_scalars:
            entropy, probability = distribution_scalars(evidence.target_logits, evidence.token_ids)
        return cls(target, draft, entropy, probability)


def distribution_scalars(
    target_logits: Tensor,  # [..., V], raw
    token_ids: Tensor,  # [...], int64
) -> tuple[Tensor, Tensor]:  # [...] nats, [...]
    """Entropy of the target's distribution and the drafted token's probability under it (PAD, appendix B)."""
    log_probs = target_logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs.nan_to_num(neginf=0.0)).sum(-1)
    return entropy, gather_token(probs, token_ids)


def assemble(recipe: FeatureRecipe, states: TokenStates) -> Tensor:
    """Features [n, F], float32: hidden states first, then entropy and probability where the recipe has them.

    Raises:
        SpecError: the states lack what the recipe reads.
    """
    encodings = ("draft", "target") if recipe.encoding == "both" else (recipe.encoding,)
    parts = []
    for reads, name, layers, found in (
        (recipe.reads_target, "target", recipe.layers, states.target),
        (recipe.reads_draft, "draft", recipe.draft_layers, states.draft),
    ):
        if not reads:
            continue
        for encoding in encodings:
            for layer in layers:
                if encoding not in found or layer not in found[encoding]:
                    raise SpecError(
                        f"a head reads the {name}'s hidden states of layer {layer} that encode the {encoding} token, "
                        "which are not there"
                    )
                parts.append(found[encoding][layer].float())
    for wanted, scalar in ((recipe.entropy, states.entropy), (recipe.probability, states.probability)):
        if wanted:
            assert scalar is not None
            parts.append(scalar.float().unsqueeze(-1))
    return torch.cat(parts, dim=-1)
