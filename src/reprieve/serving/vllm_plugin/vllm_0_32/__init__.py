"""vLLM 0.32: all that knows its internals."""
