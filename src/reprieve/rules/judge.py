"""Rule of AutoJudge and Judge Decoding: rescue tokens that a linear head on hidden states calls unimportant."""

from __future__ import annotations

from dataclasses import dataclass

from reprieve.rules.base import register_rule
from reprieve.rules.learned import LearnedRule


@register_rule
@dataclass(frozen=True)
class JudgeRule(LearnedRule):
    """Rescue tokens that a linear head on hidden states calls unimportant (AutoJudge, section 3.3; Judge Decoding)."""

    name = "judge"
    head_kind = "judge"
    made_by = "reprieve train judge"
    origin = "AutoJudge 2504.20039; Judge Decoding 2501.19309"
