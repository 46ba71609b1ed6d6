"""Models behind the engine: loading and checking a pair, KV caches with rollback, tree attention."""
