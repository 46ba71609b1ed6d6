"""Settings of runs, speed, verdicts, certificates and monitors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reprieve.errors import SpecError, require_range, require_whole
from reprieve.settings import (
    AUTO,
    MAX_PROBLEMS,
    MAX_SEED,
    NumDraftTokens,
    ProblemSettings,
    SamplingSettings,
    require_draft_tokens,
)


@dataclass(frozen=True)
class RunSettings(ProblemSettings):
    """Settings that a run applies to every arm.

    Args:
        num_trials: Answers per problem and arm, each with its own random draws.
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
        require_whole("num_requests", self.num_requests, 1, MAX_PROBLEMS, optional=True)


@dataclass(frozen=True)
class VerdictSettings:
    """Comparison of answers by a language model, for tasks without reference answers (AutoJudge, appendix L).

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


@dataclass(frozen=True)
class Promise:
    """Promise of a certificate.

    Args:
        max_drop: The loss to stay below, in (0, 0.99]: 0.01 is one point.
        confidence: Confidence level of the guarantee, in [0.5, 0.999999].
        max_growth: Growth of the mean answer length to stay below as well: 0.1 is a tenth longer. Default: not bounded.
        max_unfinished: Unfinished answers beyond lossless decoding's to stay below as well: 0.01 is one in a hundred.
            Default: not bounded.
    """

    max_drop: float
    confidence: float = 0.95
    max_growth: float | None = None
    max_unfinished: float | None = None

    def __post_init__(self) -> None:
        require_range("max_drop", self.max_drop, 0.0, 0.99, low_open=True)
        require_range("confidence", self.confidence, 0.5, 0.999999)
        require_range("max_growth", self.max_growth, 0.0, 10.0, low_open=True, optional=True)
        require_range("max_unfinished", self.max_unfinished, 0.0, 0.99, low_open=True, optional=True)


@dataclass(frozen=True)
class CertifySettings:
    """Rule, thresholds and problems of a certification.

    Args:
        rule: The rule, such as judge:path=heads/j or margin.
        thresholds: Values of the rule's dial to try. Default: probabilities from 0.005 to 0.5, for rules with a head.
        num_draft_tokens: K, drafted tokens per round; auto (adaptive), or auto:path=HEAD.
        held_out_split: Split to confirm on; if it is the calibration split, its problems after --limit are used.
        held_out_limit: Number of held-out problems.
    """

    rule: str
    promise: Promise
    thresholds: tuple[float, ...] = ()
    num_draft_tokens: NumDraftTokens = AUTO
    held_out_split: str = "test"
    held_out_limit: int = 1000
    run: RunSettings = field(default_factory=lambda: RunSettings(split="validation", limit=1000))

    def __post_init__(self) -> None:
        if len(set(self.thresholds)) != len(self.thresholds):
            raise SpecError(f"thresholds must be different values, got {list(self.thresholds)}")
        require_draft_tokens(self.num_draft_tokens)
        require_whole("held_out_limit", self.held_out_limit, 1, MAX_PROBLEMS)


@dataclass(frozen=True)
class MonitorSettings:
    """Quality monitor.

    Args:
        share: Share of answers that are checked against lossless ones.
        max_drop: Alarm once the drop is proved larger than this.
        confidence: Confidence of the interval, which is valid at any time.
    """

    share: float = 0.2
    max_drop: float | None = 0.05
    confidence: float = 0.95

    def __post_init__(self) -> None:
        require_range("share", self.share, 0.0, 1.0, low_open=True)
        require_range("max_drop", self.max_drop, 0.0, 1.0, optional=True)
        require_range("confidence", self.confidence, 0.5, 0.999999)
