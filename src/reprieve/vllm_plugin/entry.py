"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Get ready; without a configuration nothing changes."""
    from reprieve.vllm_plugin import startup

    startup.register()
