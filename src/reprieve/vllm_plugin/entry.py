"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Install the plugin's hooks; they change nothing unless Reprieve is configured.

    The import is in here so that its failure stops vLLM: a module that cannot be imported is only logged.
    """
    from reprieve.vllm_plugin import startup

    startup.register()
