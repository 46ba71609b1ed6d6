"""What is measured, and how: a record for each protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from reprieve.calibration.settings import Promise
from reprieve.errors import SpecError, require_whole
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
    """What a run asks of every arm.

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
class CertifySettings:
    """What to certify, and on which problems.

    Args:
        rule: The rule, such as judge:path=heads/j or margin.
        thresholds: Values of the rule's dial to try. Default: probabilities from 0.005 to 0.5, for rules with a head.
        num_draft_tokens: K, drafted tokens a round; auto for as many as pay, or auto:path=HEAD.
        held_out_split: Split to confirm on; the same one goes on after --limit.
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
class SpeedSettings:
    """How speed under load is measured, beside the answers: on servers only.

    Args:
        concurrency: Requests under way at once, such as 1,8,32.
        turns: Turns of every arm at every concurrency.
        num_requests: Requests of a turn. Default: twice the concurrency, at least 16.
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
    """How a language model compares the answers, for tasks without right ones (AutoJudge, appendix L).

    Args:
        judge: openai:model=NAME,url=ADDRESS; the key comes from OPENAI_API_KEY. Default: no verdicts.
        baseline: Arm that the others are compared with.
        num_votes: Votes on each answer; each vote asks in both orders.
        grade: Grade each answer from 1 to 10 instead (MT-Bench).
        num_in_flight: Questions to the judge at once.
    """

    judge: str | None = None
    baseline: str = "lossless"
    num_votes: int = 1
    grade: bool = False
    num_in_flight: int = 8


@dataclass(frozen=True)
class MonitorSettings:
    """A running check on quality.

    Args:
        share: Share of requests that are also answered losslessly.
        max_drop: Alarm once the drop is proved larger than this.
        confidence: Of the interval, at all times at once.
    """

    share: float = 0.2
    max_drop: float | None = 0.05
    confidence: float = 0.95
