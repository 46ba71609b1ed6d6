"""Identity of a pair and of an engine: what heads, labels, runs and certificates are compared by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from reprieve.errors import PairError


@dataclass(frozen=True)
class PairIdentity:
    """Identity of target, draft and tokenizer: names for people, fingerprints for checks."""

    target: str
    draft: str | None
    target_weights: str
    draft_weights: str | None
    tokenizer: str

    def differences(self, other: PairIdentity, *, reads_draft: bool) -> list[str]:
        """Return the differing parts of another pair; names are ignored, and so are irrelevant draft weights."""
        parts = ["tokenizer", "target_weights"] + (["draft_weights"] if reads_draft else [])
        return [part for part in parts if getattr(self, part) != getattr(other, part)]

    def require_matches(self, other: PairIdentity, what: str, *, reads_draft: bool) -> None:
        """Refuse another pair.

        Args:
            other: the pair at hand.
            what: names the artefact in the message.
            reads_draft: whether the draft's weights matter to it.

        Raises:
            PairError: names both pairs and what differs.
        """
        if different := self.differences(other, reads_draft=reads_draft):
            raise PairError(
                f"{what} was made for target {self.target!r} and draft {self.draft!r}, not for target "
                f"{other.target!r} and draft {other.draft!r}: different {', '.join(different)} "
                f"({', '.join(f'{getattr(self, part)} and {getattr(other, part)}' for part in different)})"
            )


@dataclass(frozen=True, kw_only=True)
class EngineIdentity:
    """The engine that generates the answers, and its precision.

    Args:
        engine: local, batched or vllm; openai for a server that does not say what it is.
        engine_version, runner: a server's release and model runner; None where there is none, or it is not known.
        engine_arguments: further flags that the server was started with.
    """

    dtype: str
    engine: str = "local"
    engine_version: str | None = None
    runner: str | None = None
    engine_arguments: str = ""

    @property
    def engine_identity(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {item.name: getattr(self, item.name) for item in fields(EngineIdentity)}


def tokenizer_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Return a fingerprint of a tokenizer: its tokens and their ids."""
    return digest(json.dumps(sorted(vocabulary.items())).encode())


def digest(content: bytes) -> str:
    """Return a short SHA-256, the format of all fingerprints here."""
    return hashlib.sha256(content).hexdigest()[:16]
