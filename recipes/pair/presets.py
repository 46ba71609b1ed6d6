"""Training recipes of the bundled pairs' models: shapes, data and training lengths.

The bundled pair's models start from those of the arithmetic pair, which know arithmetic; its target then grows to three
times as many layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipes.pair.corpus import Mixture
from recipes.pair.tokenizer import MAX_LENGTH
from recipes.pair.wordings import Style, Teller, Voice
from reprieve.tasks.word_problems import ARITHMETIC, MINIATURE, Contents


@dataclass(frozen=True)
class Recipe:
    """One model of a pair: its shape, its data mixture and its training length.

    Args:
        start: role of the arithmetic pair's model to start from; None for fresh weights.
        grown_layers: layers from `grow_at` of the training on; None for no growth.
        max_length: number of positions of the model.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_tokens: int
    learning_rate: float
    mixture: Mixture
    rows_per_update: int = 16
    row_length: int = 288
    warmup_updates: int = 200
    weight_decay: float = 0.05
    seed: int = 0
    start: str | None = None
    grown_layers: int | None = None
    grow_at: float = 1.0
    max_length: int = MAX_LENGTH

    @property
    def num_updates(self) -> int:
        return self.num_tokens // (self.rows_per_update * self.row_length)

    def layers_at(self, update: int) -> int:
        """Return the number of layers at an update."""
        grown = update >= self.grow_at * self.num_updates
        return self.grown_layers or self.num_layers if grown else self.num_layers


_ALIKE = {"chain": 1.0, "compare": 1.0, "shop": 1.0, "work": 1.0}
# The target rarely sees percentages; the draft often does, and mostly uses the second wording.
ARITHMETIC_PAIR = {
    "target": Recipe(
        num_layers=8,
        hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_tokens=20_000_000,
        learning_rate=1.5e-3,
        mixture=Mixture(
            Style(intro=0.01, opener=0.10, hedge=0.03, body=0.02, commute=0.05, order=0.05),
            Contents(_ALIKE | {"share": 0.2}, large_share=0.3),
        ),
    ),
    "draft": Recipe(
        num_layers=2,
        hidden_size=192,
        intermediate_size=512,
        num_heads=6,
        num_tokens=30_000_000,
        learning_rate=3e-3,
        mixture=Mixture(
            Style.uniform(0.85),
            Contents(_ALIKE | {"share": 1.5}, large_share=0.05, step_weights=(4.0, 3.0, 2.0, 1.0, 1.0)),
            equation_share=0.3,
        ),
        seed=1,
    ),
}
# Both use all wordings. The target sees multiples of 5% only, the draft also any percentage of round numbers.
_TARGET_VOICE = Voice(seed=0)
_DRAFT_VOICE = Voice(seed=1, like=_TARGET_VOICE, agreement=0.75, fond_of_rare=0.4)
MINIATURE_PAIR = {
    "target": replace(
        ARITHMETIC_PAIR["target"],
        num_tokens=24_000_000,
        learning_rate=1e-3,
        mixture=Mixture(
            _TARGET_VOICE,
            Contents(
                _ALIKE | {"share": 0.3},
                large_share=0.35,
                step_weights=(0.6, 1.0, 1.2, 1.2, 1.2, 1.2, 1.0, 0.8),
                fewest_steps=1,
            ),
            equation_share=0.25,
        ),
        rows_per_update=12,
        row_length=384,
        start="target",
        grown_layers=24,
        grow_at=0.88,
    ),
    "draft": replace(
        ARITHMETIC_PAIR["draft"],
        num_tokens=20_000_000,
        learning_rate=2e-3,
        mixture=Mixture(
            _DRAFT_VOICE,
            Contents(
                _ALIKE | {"share": 2.5},
                large_share=0.05,
                large_shares={"share": 0.6},
                round_share=0.5,
                step_weights=(3.0, 3.0, 2.0, 1.5, 1.0, 0.8, 0.6, 0.5),
                fewest_steps=1,
            ),
            equation_share=0.25,
            operators="++--**/%%%",
        ),
        rows_per_update=12,
        row_length=384,
        start="draft",
    ),
}
RECIPES = {"arithmetic": ARITHMETIC_PAIR, "miniature": MINIATURE_PAIR}
HALF = ("miniature",)  # pairs whose weights are shipped as float16
CONTENTS = {"arithmetic": ARITHMETIC, "miniature": MINIATURE}
# Texts that the tokenizers were learned from: fixed, so that a retrained model still fits the pair's other model.
TOKENIZER_TEXTS: dict[str, tuple[Contents, Teller]] = {
    "arithmetic": (ARITHMETIC, Style.uniform(0.5)),
    "miniature": (
        replace(MINIATURE, large_share=0.2, large_shares={"share": 0.5}, round_share=0.0),
        Voice(seed=1, like=_TARGET_VOICE, agreement=0.55, fond_of_rare=0.3),
    ),
}
