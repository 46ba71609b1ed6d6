"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Install the plugin's hooks; they change nothing unless Reprieve is configured."""
    from reprieve.vllm_plugin import startup

    startup.register()
