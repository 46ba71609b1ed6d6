"""An OpenAI-compatible server over the local engine: one request at a time, each token with its provenance."""
