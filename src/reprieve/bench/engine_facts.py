"""What an engine is: part of every run's configuration and of every certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reprieve.bench.arms import Arm
from reprieve.heads.binding import PairIdentity
from reprieve.settings import NumDraftTokens


@dataclass(frozen=True)
class EngineFacts:
    """What decodes.

    Args:
        engine: local or vllm; openai for a server that does not say what it is.
        engine_version, runner: a server's release and model runner; None where there is none, or it is not known.
        engine_arguments: flags of its own that a person gave a server.
        device: where it runs, as far as is known.
    """

    identity: PairIdentity
    dtype: str
    device: str
    engine: str = "local"
    engine_version: str | None = None
    runner: str | None = None
    engine_arguments: str = ""


class Described(Protocol):
    """What can say of itself what it is."""

    @property
    def facts(self) -> EngineFacts:
        """What decodes."""
        ...

    def fingerprints(self, drafter: str) -> dict[str, str]:
        """Of the weights that a drafter brings with it, by name."""
        ...

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        """How many tokens a round of an arm drafts, as certificates have it: K, `auto`, or `auto:` and a head."""
        ...

    def refusal(self, arm: Arm, drafter: str) -> str:
        """Why it cannot decode as this arm does; empty where it can."""
        ...

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """Be ready for these arms, beside those of before."""
        ...
