"""Reprieve gives rejected draft tokens a second chance: relaxed verification for speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reprieve.engine import SamplingParams, SpeculativeDecoder
    from reprieve.engine.custom_generate import custom_generate
    from reprieve.models import Pair, load_pair
    from reprieve.rules import parse_rule

# Imported when first used, so that `import reprieve` costs nothing and `reprieve --help` answers at once.
_HOMES = {
    "SamplingParams": "reprieve.engine",
    "SpeculativeDecoder": "reprieve.engine",
    "custom_generate": "reprieve.engine.custom_generate",
    "Pair": "reprieve.models",
    "load_pair": "reprieve.models",
    "parse_rule": "reprieve.rules",
}

__all__ = ["Pair", "SamplingParams", "SpeculativeDecoder", "custom_generate", "load_pair", "parse_rule"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'reprieve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
