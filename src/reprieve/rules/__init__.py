"""Acceptance rules: pure functions of tensors, one file per paper."""

from reprieve.rules.accept import RiskBudget, accept
from reprieve.rules.arbiter import ArbiterRule
from reprieve.rules.asd import AsdRule
from reprieve.rules.base import Rule, accepts
from reprieve.rules.cascades import CascadeRule
from reprieve.rules.compose import AllOf, AnyOf, InsideSpan, all_of, any_of
from reprieve.rules.fly import FlyRule
from reprieve.rules.fuzzy import FuzzyRule
from reprieve.rules.learned import JudgeRule, PivotRule
from reprieve.rules.lenience import LenienceRule
from reprieve.rules.lossless import LosslessRule
from reprieve.rules.lts import LtsRule
from reprieve.rules.margin import FloorRule, MarginRule, RatioRule
from reprieve.rules.math_symbols import MathSymbolsRule
from reprieve.rules.random_acceptance import RandomRule
from reprieve.rules.spec import RULES, parse_rule
from reprieve.rules.top_k import TopKRule
from reprieve.rules.typical import TypicalRule

__all__ = [
    "RULES",
    "AllOf",
    "AnyOf",
    "ArbiterRule",
    "AsdRule",
    "CascadeRule",
    "FloorRule",
    "FlyRule",
    "FuzzyRule",
    "InsideSpan",
    "JudgeRule",
    "LenienceRule",
    "LosslessRule",
    "LtsRule",
    "MarginRule",
    "MathSymbolsRule",
    "PivotRule",
    "RandomRule",
    "RatioRule",
    "RiskBudget",
    "Rule",
    "TopKRule",
    "TypicalRule",
    "accept",
    "accepts",
    "all_of",
    "any_of",
    "parse_rule",
]
