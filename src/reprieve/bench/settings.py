"""Settings of measurements: one record for each protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reprieve.errors import SpecError, require_whole
from reprieve.settings import MAX_PROBLEMS, MAX_SEED, ProblemSettings, SamplingSettings


@dataclass(frozen=True)
class RunSettings(ProblemSettings):
    """Settings that a run applies to every arm.

    Args:
        num_trials: Answers per problem and arm, each with draws of its own.
        drafter: draft, ngram:max_ngram=3, or eagle3:path=FOLDER,depth=6,top_k=8,total_tokens=32.
        seed: Same seed, same answers.
    """

    num_trials: int = 1
    drafter: str = "draft"
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("num_trials", self.num_trials, 1, 10_000)
        require_whole("seed", self.seed, 0, MAX_SEED)


@dataclass(frozen=True)
class SpeedSettings:
    """Measurement of speed under load, in addition to the answers. Requires a server engine.

    Args:
        concurrency: Concurrent requests, such as 1,8,32.
        turns: Repetitions of each arm at each concurrency.
        num_requests: Requests per repetition. Default: twice the concurrency, at least 16.
    """

    concurrency: tuple[int, ...] = ()
    turns: int = 3
    num_requests: int | None = None

    def __post_init__(self) -> None:
        for level in self.concurrency:
            require_whole("concurrency", level, 1, 65_536)
        require_whole("turns", self.turns, 1, 10_000)
        if self.num_requests is not None:
            require_whole("num_requests", self.num_requests, 1, MAX_PROBLEMS)


@dataclass(frozen=True)
class VerdictSettings:
    """Comparison of answers by a language model, for tasks without right answers (AutoJudge, appendix L).

    Args:
        judge: openai:model=NAME,url=ADDRESS; the key comes from OPENAI_API_KEY. Default: no verdicts.
        baseline: Arm that the others are compared with.
        num_votes: Votes on each answer; each vote asks in both orders.
        num_in_flight: Questions to the judge at once.
    """

    judge: str | None = None
    baseline: str = "lossless"
    num_votes: int = 1
    num_in_flight: int = 8

    @property
    def recorded(self) -> dict[str, Any]:
        """The part of these settings that each verdict records."""
        return {"judge": str(self.judge), "baseline": self.baseline, "num_votes": self.num_votes}

    def __post_init__(self) -> None:
        require_whole("votes", self.num_votes, 1)
        require_whole("in_flight", self.num_in_flight, 1)
        for name in ("baseline", "num_votes", "num_in_flight"):
            if self.judge is None and getattr(self, name) != getattr(type(self), name):
                flag = name.removeprefix("num_").replace("_", "-")
                raise SpecError(f"--{flag} requires --judge openai:model=NAME,url=ADDRESS")
