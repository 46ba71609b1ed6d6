"""Reprieve inside vLLM: a plugin, not a fork. Installed but not configured, it changes nothing.

vllm serve TARGET --speculative-config '{...}' --additional-config '{"reprieve": "margin:delta=2"}'
"""

from __future__ import annotations

from reprieve.serving.vllm_plugin.health import require_active

__all__ = ["register", "require_active"]


def register() -> None:
    """The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""
    from reprieve.serving.vllm_plugin.vllm_0_32 import startup

    startup.register()
