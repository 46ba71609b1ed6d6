"""OpenAI-compatible servers that hold the target: running ones, and vLLM started here."""
