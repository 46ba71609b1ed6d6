"""Rule-based baseline of AutoJudge's appendix K: mathematical tokens are important, all others are not."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reprieve.errors import require_choice, require_counts
from reprieve.rules.base import Dial, Rule, Traits, register_rule
from reprieve.rules.distributions import token_rank
from reprieve.types import Evidence, Tokenizer

# A digit, an operator or relation, or a lone letter used as a variable.
_MATHEMATICAL = re.compile(r"[0-9+\-*/=<>^%×÷±√∑π]|^\s*[a-zA-Z]\s*$")
_ARTICLES = {"a", "A", "I"}


def is_mathematical(text: str) -> bool:
    """Return True if the text holds a digit or an operator, or is a one-letter variable ("a" and "I" are words)."""
    return bool(_MATHEMATICAL.search(text)) and text.strip() not in _ARTICLES


@register_rule
@dataclass(frozen=True)
class MathSymbolsRule(Rule):
    """Reject mismatches in mathematical tokens; accept the others among the target's k most likely.

    Args:
        k: cap on the drafted token's rank (the paper's "Math & Top-1024", "Math & Top-128"); None for none ("Math
            only"), 1 is lossless.
        tokens: `either` refuses if the drafted token or the target's best one is mathematical; `draft` looks at the
            drafted token only.

    Relaxed: misses planning steps that contain no symbol (AutoJudge, Table 10).
    """

    name = "math_symbols"
    own_dial = Dial("k", strictest=1, stops=(1, 2, 4, 8, 16, 32, 64, 128))
    own_traits = Traits(reads_text=True)
    origin = "AutoJudge 2504.20039, appendix K"

    k: int | None = None
    tokens: str = "either"
    symbol_mask: Tensor | None = field(default=None, compare=False, metadata={"spec": False})  # [V], bool

    def __post_init__(self) -> None:
        require_counts(self, "k")
        require_choice("tokens", self.tokens, ("either", "draft"))

    @property
    def threshold(self) -> float:
        if self.k == 1:
            return 0.0
        return float(torch.iinfo(torch.int32).max) if self.k is None else float(self.k)

    def bind(self, tokenizer: Tokenizer) -> MathSymbolsRule:
        """Classify every token of the vocabulary."""
        mask = torch.tensor([is_mathematical(tokenizer.decode([token_id])) for token_id in range(len(tokenizer))])
        return dataclasses.replace(self, symbol_mask=mask)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the rank under the target, [...]; infinite for mathematical mismatches."""
        assert self.symbol_mask is not None, "bind the rule to a tokenizer first"
        mask = self.symbol_mask.to(evidence.token_ids.device)
        # Logits can have padding rows beyond the tokenizer's size.
        important = mask[evidence.token_ids.clamp_max(len(mask) - 1)]
        if self.tokens == "either":
            important = important | mask[evidence.scores.argmax(-1).clamp_max(len(mask) - 1)]
        rank = token_rank(evidence.scores, evidence.token_ids).float()
        return torch.where(important, math.inf, rank)
