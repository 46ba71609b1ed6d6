"""Settings of heads: feature recipes, and the shape of an arbiter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reprieve.errors import SpecError, require_choice, require_range, require_whole

if TYPE_CHECKING:
    from reprieve.types import Need  # imports torch

BUCKETS = ("none", "entropy", "distance", "margin")  # quantities that an lts calibration can be bucketed by
VERSION = 1
_MOST_RANKS, _MOST_LAYERS = 4096, 1024
STATES = ("target", "draft", "both")
ENCODINGS = ("draft", "target", "previous", "both")
_AT_DECODING = ("draft", "previous")  # encodings available while decoding


@dataclass(frozen=True)
class FeatureRecipe:
    """States and scalars that make up a head's features.

    Order: target states, draft states, entropy, probability, and the draft's entropy and probability. Distributions are
    the model's own: temperature 1, no truncation.

    Args:
        states: models that the hidden states come from: target, draft or both.
        encoding: token whose states are read (AutoJudge, appendix B): draft, target, previous (which predicted both),
            or both of the first two. Decoding has no states of the target's own token.
        layers: of the target, as indices into transformers' `hidden_states`; -1 is the last, after the final norm.
        draft_layers: of the draft.
        entropy: add the entropy of the target's distribution, nats.
        probability: add the target's probability of the drafted token.
        draft_scalars: add the entropy of the draft's distribution, and its probability of the drafted token.
        version: version of these definitions.
    """

    states: str = "target"
    encoding: str = "draft"
    layers: tuple[int, ...] = (-1,)
    draft_layers: tuple[int, ...] = (-1,)
    entropy: bool = False
    probability: bool = False
    draft_scalars: bool = False
    version: int = VERSION

    def __post_init__(self) -> None:
        require_choice("states", self.states, STATES)
        require_choice("encoding", self.encoding, ENCODINGS)
        require_choice("version of the feature recipe", self.version, (VERSION,))
        if not self.layers or not self.draft_layers:
            raise SpecError("layers must name at least one layer, got none")
        for layer in (*self.layers, *self.draft_layers):
            require_whole("layers", layer, -_MOST_LAYERS, _MOST_LAYERS)

    @property
    def name(self) -> str:
        """Readable name: `target states of the draft token, layers -1, entropy, probability (v1)`."""
        whose = {"both": "target and draft"}.get(self.states, self.states)
        which = {"both": "draft and target tokens", "previous": "previous token"}.get(
            self.encoding, f"{self.encoding} token"
        )
        layers = self.layers if self.reads_target else self.draft_layers
        extra = [word for word in ("entropy", "probability") if getattr(self, word)]
        extra += ["the draft's entropy and probability"] * self.draft_scalars
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
        """Inputs of a round that it reads."""
        from reprieve.types import Need

        needed = set()
        if self.reads_target:
            needed.add(Need.PARENT_HIDDEN if self.encoding == "previous" else Need.NODE_HIDDEN)
        if self.reads_draft:
            needed.add(Need.DRAFT_HIDDEN)
        if self.draft_scalars:
            needed.add(Need.DRAFT_PROBS)
        return frozenset(needed)

    @property
    def encodings(self) -> tuple[str, ...]:
        """Tokens whose states it reads: draft, target, previous."""
        return ("draft", "target") if self.encoding == "both" else (self.encoding,)

    @property
    def num_scalars(self) -> int:
        return int(self.entropy) + int(self.probability) + 2 * int(self.draft_scalars)

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


_MOST_READINGS = 1 << 20


@dataclass(frozen=True)
class ArbiterShape:
    """Adapters on the draft's backbone, and the mask (CoSpec, appendix C.1).

    Args:
        rank: Rank of the LoRA adapters.
        scale: Alpha of the LoRA adapters.
        dropout: Dropout on the adapters' input during the warm-up.
        hybrid: Bidirectional attention between drafted and target tokens; without it, causal (the paper's Table 8).
        num_readings: size of the values added for each drafted token (`heads.classifiers.READINGS`); 0 for none.
        seed: Random seed of the initial weights.
    """

    rank: int = 16
    scale: float = 32.0
    dropout: float = 0.05
    hybrid: bool = True
    num_readings: int = field(default=0, metadata={"flag": False})
    seed: int = field(default=0, metadata={"flag": False})

    def __post_init__(self) -> None:
        require_whole("rank", self.rank, 1, _MOST_RANKS)
        require_range("scale", self.scale, 0.0, 1e6, low_open=True)
        require_whole("num_readings", self.num_readings, 0, _MOST_READINGS)
        require_range("dropout", self.dropout, 0.0, 0.9)


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's published choice of target layers, as indices into transformers' `hidden_states`."""
    return (2, num_layers // 2, num_layers - 3)
