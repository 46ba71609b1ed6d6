"""Reprieve gives rejected draft tokens a second chance: relaxed verification for speculative decoding.

pair = reprieve.load_pair()
decoder = pair.decoder("margin:delta=3")
print(decoder.generate("...").text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reprieve.engine import Pair, SpeculativeDecoder, load_pair
    from reprieve.engine.custom_generate import custom_generate
    from reprieve.errors import ReprieveError
    from reprieve.heads.loading import load_head
    from reprieve.rules import Rule, parse_rule, register_rule
    from reprieve.settings import SamplingParams
    from reprieve.tasks import load_task
    from reprieve.types import Generation

__version__ = "1.0.0"

# Imported when first used, so that `import reprieve` costs nothing and `reprieve --help` answers at once.
_HOMES = {
    "Generation": "reprieve.types",
    "Pair": "reprieve.engine",
    "ReprieveError": "reprieve.errors",
    "Rule": "reprieve.rules",
    "SamplingParams": "reprieve.settings",
    "SpeculativeDecoder": "reprieve.engine",
    "custom_generate": "reprieve.engine.custom_generate",
    "load_head": "reprieve.heads.loading",
    "load_pair": "reprieve.engine",
    "load_task": "reprieve.tasks",
    "parse_rule": "reprieve.rules",
    "register_rule": "reprieve.rules",
}

__all__ = [
    "Generation",
    "Pair",
    "ReprieveError",
    "Rule",
    "SamplingParams",
    "SpeculativeDecoder",
    "__version__",
    "custom_generate",
    "load_head",
    "load_pair",
    "load_task",
    "parse_rule",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'reprieve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
