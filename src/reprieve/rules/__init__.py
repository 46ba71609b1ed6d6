"""Acceptance rules: pure functions of tensors, one file per paper. `RULES` finds the files by itself."""

from reprieve.rules.accept import RiskBudget, accept
from reprieve.rules.base import RULES, About, Dial, Rule, Traits, accepts, register_rule
from reprieve.rules.checks import Checked
from reprieve.rules.compose import AllOf, AnyOf, all_of, any_of
from reprieve.rules.lossless import LosslessRule
from reprieve.rules.spans import InsideSpan, StrictFirst
from reprieve.rules.spec import parse_rule

__all__ = [
    "RULES",
    "About",
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
    "all_of",
    "any_of",
    "parse_rule",
    "register_rule",
]
