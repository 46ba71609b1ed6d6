"""Hooks for vLLM's V1 model runner. vLLM has deprecated it; this folder will be removed together with it."""
