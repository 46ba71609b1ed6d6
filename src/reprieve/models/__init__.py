"""Models behind the engine: loading and checking a pair, KV caches with rollback, tree attention."""

from reprieve.models.cached_model import CachedModel
from reprieve.models.loading import ModelPair, load_models

__all__ = ["CachedModel", "ModelPair", "load_models"]
