"""Drafters: propose tokens for the target to verify."""

from reprieve.drafters.base import DRAFTERS, Drafter, DrafterSettings, NoDrafter, register_drafter
from reprieve.drafters.draft_model import DraftModelDrafter
from reprieve.drafters.eagle3 import EagleDrafter, EagleSettings
from reprieve.drafters.ngram import NgramDrafter, NgramSettings

__all__ = [
    "DRAFTERS",
    "DraftModelDrafter",
    "Drafter",
    "DrafterSettings",
    "EagleDrafter",
    "EagleSettings",
    "NgramDrafter",
    "NgramSettings",
    "NoDrafter",
    "register_drafter",
]
