"""Drafters: whatever proposes tokens for the target to verify."""

from reprieve.drafters.base import Drafter
from reprieve.drafters.draft_model import DraftModelDrafter
from reprieve.drafters.eagle3 import EagleDrafter, TreeShape
from reprieve.drafters.ngram import NgramDrafter
from reprieve.drafters.none import NoDrafter

__all__ = ["DraftModelDrafter", "Drafter", "EagleDrafter", "NgramDrafter", "NoDrafter", "TreeShape"]
