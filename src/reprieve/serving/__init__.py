"""Serving: a plugin for vLLM and a small OpenAI-compatible server over the local engine."""
