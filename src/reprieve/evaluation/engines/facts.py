"""What an engine is: part of every run's configuration and of every certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reprieve.evaluation.arms import Arm
from reprieve.heads.binding import PairIdentity


@dataclass(frozen=True)
class EngineFacts:
    """What decodes.

    Args:
        engine: local or vllm; openai for a server that does not say what it is.
        engine_version, runner: a server's release and model runner; None where there is none, or it is not known.
        device: where it runs, as far as is known.
    """

    identity: PairIdentity
    dtype: str
    device: str
    engine: str = "local"
    engine_version: str | None = None
    runner: str | None = None


class Described(Protocol):
    """What can say of itself what it is."""

    @property
    def facts(self) -> EngineFacts:
        """What decodes."""
        ...

    def fingerprints(self, drafter: str) -> dict[str, str]:
        """Of the weights that a drafter brings with it, by name."""
        ...

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """Be ready for these arms, beside those of before."""
        ...
