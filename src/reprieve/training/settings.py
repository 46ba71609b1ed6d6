"""Settings of the training recipes. Defaults are the paper's where it gives them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from reprieve.errors import SpecError, require_choice, require_counts, require_range, require_whole
from reprieve.heads.settings import BUCKETS, ArbiterShape, FeatureRecipe, default_layers
from reprieve.settings import MAX_DRAFT_TOKENS

_MAX_SEED = 2**40  # recipes multiply it by a million, which must stay below 2**63


@dataclass(frozen=True)
class JudgeTraining:
    """AutoJudge's linear head: states and the grid of penalties.

    Args:
        states: Hidden states of target, draft or both.
        encoding: Position of the hidden state: at the drafted token (draft), or at the token before it (previous).
        layers: Target layers, such as -1 or -1,-4; -1 is the last, after the norm.
        grid: Values of C to try, scikit-learn's inverse strength of the penalty.
        held_out: Share of the problems held out, on which C is chosen.
        seed: Random seed of the split.
    """

    states: str = "target"
    encoding: str = "draft"
    layers: tuple[int, ...] = (-1,)
    grid: tuple[float, ...] = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self.recipe.require_decodable()
        if not self.grid or not all(0 < c < float("inf") for c in self.grid):
            raise SpecError(f"grid must hold finite values of C above 0, got {list(self.grid)}")
        require_range("held_out", self.held_out, 0.0, 0.9, low_open=True)
        require_whole("seed", self.seed, 0, _MAX_SEED)

    @property
    def recipe(self) -> FeatureRecipe:
        """Feature recipe of the head."""
        return FeatureRecipe(states=self.states, encoding=self.encoding, layers=self.layers)


@dataclass(frozen=True)
class StateArbiterTraining(JudgeTraining):
    """Two linear heads on both models' states: states and the grid of penalties.

    Args:
        states: Hidden states of target, draft or both.
        held_out: Share of the problems in each cross-validation fold, on which both values of C are chosen.
    """

    states: str = "both"
    held_out: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("held_out", self.held_out, 0.0, 0.5, low_open=True)  # at least two folds

    @property
    def recipe(self) -> FeatureRecipe:
        """Feature recipe of the head."""
        return dataclasses.replace(super().recipe, entropy=True, probability=True, draft_scalars=True)


@dataclass(frozen=True)
class PivotTraining:
    """PAD's two-branch MLP: sizes and optimisation, which the paper does not specify. AdamW on shuffled batches.

    Args:
        layers: Target layers, such as -1 or -1,-4; -1 is the last, after the norm.
        hidden_size: Units of the branch on the hidden state.
        scalar_size: Units of the branch on entropy and probability.
        fuse_size: Units of the layer that joins both.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        dropout: Share of the standardised features set to their mean during training, 0 to 0.9.
        batch_size: Labels in one step.
        num_epochs: Maximum number of epochs.
        patience: Epochs without a lower validation loss before training stops.
        held_out: Share of the problems held out, on which the epoch is chosen.
        seed: Random seed of split, weights and batches.
    """

    layers: tuple[int, ...] = (-1,)
    hidden_size: int = 64
    scalar_size: int = 16
    fuse_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    dropout: float = 0.3
    batch_size: int = 128
    num_epochs: int = 60
    patience: int = 10
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_counts(self, "hidden_size", "scalar_size", "fuse_size", "batch_size", "num_epochs", "patience")
        require_range("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        require_range("weight_decay", self.weight_decay, 0.0, 10.0)
        require_range("dropout", self.dropout, 0.0, 0.9)
        require_range("held_out", self.held_out, 0.0, 0.9, low_open=True)
        require_whole("seed", self.seed, 0, _MAX_SEED)

    @property
    def recipe(self) -> FeatureRecipe:
        """Feature recipe of the head."""
        return FeatureRecipe(layers=self.layers, entropy=True, probability=True)


@dataclass(frozen=True)
class LengthTraining:
    """Draft length head.

    Args:
        thresholds: Values of the rule's dial to train on, in turn. Default: the rule's own.
        temperatures: Temperatures of target and draft to train on, in turn.
        num_draft_tokens: K: length of the training blocks, and maximum length of the head's blocks.
        grid: Values of C to try, scikit-learn's inverse strength of the penalty.
        held_out: Share of the problems held out, on which C and the price are chosen.
        seed: Random seed of split and draws.
    """

    thresholds: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_draft_tokens: int = 20
    grid: tuple[float, ...] = (0.1, 0.01, 0.001)
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole("num_draft_tokens", self.num_draft_tokens, 2, MAX_DRAFT_TOKENS)
        require_range("held_out", self.held_out, 0.0, 0.9, low_open=True)
        require_whole("seed", self.seed, 0, _MAX_SEED)
        if not self.grid or not all(0 < c < float("inf") for c in self.grid):
            raise SpecError(f"grid must hold finite values of C above 0, got {list(self.grid)}")
        if not self.temperatures:
            raise SpecError("temperatures must hold at least one value, got none")
        for temperature in self.temperatures:
            require_range("temperatures", temperature, 0.0, 1e6)


@dataclass(frozen=True)
class EagleTraining:
    """Shape and training of an EAGLE-3 head.

    Args:
        layers: Target layers to read, low to high, as indices into transformers' hidden_states. Default: the
            published choice (2, n // 2, n - 3 for n layers).
        draft_vocab_size: Number of the target's most frequent tokens that it can draft.
        intermediate_size: Intermediate size of the head's decoder layer. Default: the target's own.
        num_steps: Unrolled steps of training-time test; about the depth of its drafts.
        step_decay: Weight of each step relative to the one before, (0, 1].
        num_passes: Number of passes over the answers.
        tokens_per_update: Maximum number of tokens per update, prompts included.
        learning_rate: Peak learning rate.
        warmup_updates: Number of updates until the peak learning rate.
        weight_decay: Weight decay of AdamW.
        held_out: Share of the answers held out for evaluation.
        seed: Random seed of answers, weights and batches.
    """

    layers: tuple[int, ...] = ()
    draft_vocab_size: int = 32_000
    intermediate_size: int | None = None
    num_steps: int = 5
    step_decay: float = 0.9
    num_passes: int = 3
    tokens_per_update: int = 512
    learning_rate: float = 1e-3
    warmup_updates: int = 100
    weight_decay: float = 0.01
    held_out: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        require_counts(self, "draft_vocab_size", "num_steps", "num_passes", "tokens_per_update", "intermediate_size")
        require_range("step_decay", self.step_decay, 0.0, 1.0, low_open=True)
        require_range("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        require_range("warmup_updates", self.warmup_updates, 0, 1e9)
        require_range("weight_decay", self.weight_decay, 0.0, 10.0)
        require_range("held_out", self.held_out, 0.0, 0.9, low_open=True)
        require_whole("seed", self.seed, 0, _MAX_SEED)

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the layers to read from a target of this depth.

        Raises:
            SpecError: a layer that the target does not have, or one twice.
        """
        layers = self.layers or default_layers(num_target_layers)
        if len(set(layers)) != len(layers) or not all(0 <= layer <= num_target_layers for layer in layers):
            raise SpecError(f"layers must be different ones in [0, {num_target_layers}], got {layers}")
        return layers


@dataclass(frozen=True)
class ArbiterTraining:
    """CoSpec's supervised stage (appendix C.1).

    Args:
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        decisions_per_update: Labelled mismatches per update, rounded up to whole answers.
        num_epochs: Number of passes over the labels.
        held_out: Share of the problems left out, on which the best epoch is chosen.
        tie: Relabel with this value if both branches end equally well. At 0.5, a label is linear in the difference
            of utilities, so that lambda 0.5 separates the better branch. Default: the traces' own labels.
        lambda_: Lambda for validation, stored as the arbiter's recommended value.
        readings: Add both models' last states, entropies and probabilities of each drafted token to the input (ours).
        seed: Random seed of split, weights and batches.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.1
    decisions_per_update: int = 256
    num_epochs: int = 3
    held_out: float = 0.1
    tie: float | None = None
    lambda_: float = 0.6
    readings: bool = False
    seed: int = 0
    shape: ArbiterShape = field(default_factory=ArbiterShape)

    def __post_init__(self) -> None:
        require_range("tie", self.tie, 0.0, 1.0, optional=True)
        require_counts(self, "decisions_per_update", "num_epochs")
        require_range("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        require_range("weight_decay", self.weight_decay, 0.0, 10.0)
        require_range("held_out", self.held_out, 0.0, 0.9, low_open=True)
        require_whole("seed", self.seed, 0, _MAX_SEED)
        require_range("lambda", self.lambda_, 0.0, 1.0)


@dataclass(frozen=True)
class LtsTraining:
    """Constants of ARC-Decode's bound and their calibration.

    Args:
        delta: Share of positions the bound may miss, (0, 0.5]; the paper uses 0.05.
        active: Size of the active vocabulary, the paper's top-K: candidates come from the target's k most likely
            tokens except the first, and divergences use both distributions' k most likely. 2 or more.
        candidates: likely (the paper's: uniform among those), or drafted (the draft's token).
        safety: alpha, the factor on the log-probability side; 1 or more.
        bucket_by: none, entropy, distance or margin.
        buckets: Number of equally filled buckets.
        confidence: Replace each empirical quantile by the Clopper-Pearson upper limit for it at this confidence.
        seed: Random seed of answers and candidates.
    """

    delta: float = 0.05
    active: int = 10
    candidates: str = "likely"
    safety: float = 1.0
    bucket_by: str = "none"
    buckets: int = 4
    confidence: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_range("delta", self.delta, 0.0, 0.5, low_open=True)
        require_whole("active", self.active, 2)
        require_choice("candidates", self.candidates, ("likely", "drafted"))
        require_range("safety", self.safety, 1.0, 1e6)
        require_choice("bucket_by", self.bucket_by, BUCKETS)
        require_whole("buckets", self.buckets, 1)
        require_whole("seed", self.seed, 0, _MAX_SEED)
        require_range("confidence", self.confidence, 0.5, 0.999999, optional=True)
