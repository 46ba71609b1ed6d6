"""The engine: one draft, verify, accept, commit loop over any pair, drafter and rule."""

from reprieve.engine.decoder import Advisor, SpeculativeDecoder
from reprieve.models.sampling import Sampler, SamplingParams

__all__ = ["Advisor", "Sampler", "SamplingParams", "SpeculativeDecoder"]
