"""Facts about an engine: part of every run's configuration and of every certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reprieve.bench.arms import Arm
from reprieve.heads.binding import PairIdentity
from reprieve.settings import NumDraftTokens


@dataclass(frozen=True)
class EngineFacts:
    """Kind, version and device of the engine that decodes.

    Args:
        engine: local or vllm; openai for a server that does not say what it is.
        engine_version, runner: a server's release and model runner; None where there is none, or it is not known.
        engine_arguments: further flags that the server was started with.
        device: device that it runs on, if known.
    """

    identity: PairIdentity
    dtype: str
    device: str
    engine: str = "local"
    engine_version: str | None = None
    runner: str | None = None
    engine_arguments: str = ""


class Described(Protocol):
    """Interface of engines that report facts about themselves."""

    @property
    def facts(self) -> EngineFacts:
        """Kind, version and device of this engine."""
        ...

    def fingerprints(self, drafter: str) -> dict[str, str]:
        """Fingerprints of a drafter's own weights, by name."""
        ...

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        """Draft length of an arm, as certificates record it: K, `auto`, or `auto:` and a head."""
        ...

    def refusal(self, arm: Arm, drafter: str) -> str:
        """Return the reason why the engine cannot run this arm; empty if it can."""
        ...

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """Prepare for these arms, in addition to those of earlier calls."""
        ...
