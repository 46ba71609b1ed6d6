"""vLLM's V1 model runner: deprecated there; this folder goes with it."""
