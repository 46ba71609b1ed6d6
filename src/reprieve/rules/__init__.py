"""Acceptance rules: pure functions of tensors, one file per paper. `RULES` finds the files by itself."""

from reprieve.rules.accept import RiskBudget, accept
from reprieve.rules.base import RULES, Dial, Rule, Traits, accepts, register_rule
from reprieve.rules.compose import AllOf, AnyOf, InsideSpan, StrictFirst, parse_rule
from reprieve.rules.lossless import Checked, LosslessRule

__all__ = [
    "RULES",
    "AllOf",
    "AnyOf",
    "Checked",
    "Dial",
    "InsideSpan",
    "LosslessRule",
    "RiskBudget",
    "Rule",
    "StrictFirst",
    "Traits",
    "accept",
    "accepts",
    "parse_rule",
    "register_rule",
]
