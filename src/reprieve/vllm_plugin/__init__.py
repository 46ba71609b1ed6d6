"""Reprieve inside vLLM: a plugin, not a fork. Installed but not configured, it changes nothing.

vllm serve TARGET --speculative-config '{...}' --additional-config '{"reprieve": "margin:delta=2"}'
"""

from __future__ import annotations

from typing import Any

from reprieve.errors import ReprieveError

__all__ = ["require_active"]


def require_active(llm: Any) -> list[dict[str, Any]]:
    """Return the plugin's state in every worker of an offline `LLM`, one dictionary each.

    Raises:
        ReprieveError: a worker that runs without the plugin, or without its rule.
    """
    try:
        statuses: list[dict[str, Any]] = llm.collective_rpc("reprieve_status")
    except Exception as error:  # vLLM has many ways to say that a worker lacks a method
        raise ReprieveError(f"the plugin did not load in a worker of vLLM, which serves losslessly: {error}") from None
    require_healthy(statuses)
    return statuses


def require_healthy(statuses: list[dict[str, Any]]) -> None:
    """Raise an error if a worker's `reprieve_status` says that it does not apply the rule.

    Raises:
        ReprieveError: names the worker and its status.
    """
    for status in statuses:
        if not status["active"] or status["failures"]:
            raise ReprieveError(f"worker {status['rank']} does not apply the rule: {status}")
