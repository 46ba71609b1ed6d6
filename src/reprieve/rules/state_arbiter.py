"""An arbitrator that reads states: take the draft's token where it leads to a better answer, or to no worse one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reprieve.needs import Need
from reprieve.rules.base import About, Dial, Traits, register_rule
from reprieve.rules.learned import LearnedRule


@register_rule
@dataclass(frozen=True)
class StateArbiterRule(LearnedRule):
    """Rescue a mismatch where two linear heads see no harm in the draft's token, or more good than harm.

    CoSpec's question (which side of a mismatch ends better?), answered from what verification has computed instead of
    by a model of its own. Its risk is (1 + P(worse) - P(better)) / 2: at `threshold` 0.5 a token passes where it is as
    likely to mend the answer as to spoil it.
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
