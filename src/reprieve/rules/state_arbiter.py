"""Arbitrator on hidden states: accept the draft's token where the answer is not expected to get worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprieve.needs import Need
from reprieve.rules.base import About, Dial, Traits, register_rule
from reprieve.rules.learned import LearnedRule


@register_rule
@dataclass(frozen=True)
class StateArbiterRule(LearnedRule):
    """Rescue a mismatch where two linear heads predict no harm from the draft's token, or more benefit than harm.

    CoSpec's question (which side of a mismatch ends better?), answered from the states that verification computes, not
    by a separate network. The risk is (1 + P(worse) - P(better)) / 2: at `threshold` 0.5 a token passes if it improves
    the answer as often as it harms it.

    Relaxed: no bound on the output distribution.
    """

    name = "state_arbiter"
    own_dial: ClassVar[Dial | None] = Dial(
        "threshold", strictest=0.0, stops=(0.0, 0.4, 0.45, 0.48, 0.49, 0.5, 0.51, 0.52, 0.55, 0.6, 0.7, 0.8)
    )
    own_traits = Traits(needs=frozenset({Need.DRAFT_HIDDEN}), beyond_truncation=True)
    head_kind = "state_arbiter"
    made_by = "reprieve train state-arbiter"
    about = About(
        "Reprieve; the question is CoSpec's", study=("state_arbiter:threshold=0.51", "state_arbiter:threshold=0.5")
    )
