"""Models behind the engine: loading and checking a pair, KV caches with rollback, tree attention."""

from reprieve.models.cached_model import CachedModel
from reprieve.models.loading import ModelPair

__all__ = ["CachedModel", "ModelPair"]
