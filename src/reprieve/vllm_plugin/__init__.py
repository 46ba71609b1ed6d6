"""Reprieve inside vLLM: a plugin, not a fork. Installed but not configured, it changes nothing.

vllm serve TARGET --speculative-config '{...}' --additional-config '{"reprieve": "margin:delta=2"}'
"""

from __future__ import annotations

from reprieve.vllm_plugin.health import require_active

__all__ = ["require_active"]
