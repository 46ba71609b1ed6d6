"""The engine: one draft, verify, accept, commit loop over any pair, drafter and rule."""

from reprieve.engine.decoder import SpeculativeDecoder
from reprieve.engine.pair import DRAFT_ONLY, TARGET_ONLY, Pair, load_pair
from reprieve.settings import SamplingParams

__all__ = ["DRAFT_ONLY", "TARGET_ONLY", "Pair", "SamplingParams", "SpeculativeDecoder", "load_pair"]
