"""OpenAI-compatible server over the local engine, with a page that shows each token's provenance."""
