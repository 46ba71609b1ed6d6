"""What is measured, and how: a record for each protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from reprieve.calibration.settings import Promise
from reprieve.errors import SpecError, require_range, require_whole
from reprieve.settings import (
    AUTO,
    MAX_PROBLEMS,
    MAX_SEED,
    NumDraftTokens,
    ProblemSettings,
    PromptSettings,
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
class FsdSettings:
    """How FSD's authors chose thresholds (section 5.1 and appendix D): a small run chooses, a larger one measures.

    Args:
        rule: The rule without its threshold.
        thresholds: Rising values of its dial; the authors' own grid unless given.
        num_draft_tokens: Values of K to try for lossless.
        lost_share: Stop once this share of the accuracy gap between target and draft is lost, (0, 1].
        main_split: Split to measure on.
        main_limit: Number of problems to measure on.
        main_trials: Answers per problem and arm, there.
    """

    rule: str = "fuzzy"
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    num_draft_tokens: tuple[NumDraftTokens, ...] = (4, 8, 12, 16, 24, 32, AUTO)
    lost_share: float = 0.2
    main_split: str = "test"
    main_limit: int = 200
    main_trials: int = 3
    run: RunSettings = field(
        default_factory=lambda: RunSettings(
            split="validation", limit=40, sampling=SamplingSettings(temperature=1.0, draft_temperature=0.0)
        )
    )

    def __post_init__(self) -> None:
        require_range("lost_share", self.lost_share, 0.0, 1.0, low_open=True)
        if list(self.thresholds) != sorted(set(self.thresholds)):
            raise SpecError(f"thresholds must rise, got {list(self.thresholds)}")
        for name in ("main_limit", "main_trials"):
            require_whole(name, getattr(self, name), 1)


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


@dataclass(frozen=True)
class HarnessSettings:
    """What lm-evaluation-harness is asked to do.

    Args:
        tasks: lm_eval's tasks, such as gsm8k,mmlu, or reprieve_word_problems.
        data: Local JSONL instead of a task's hub data: gsm8k:train=FILE,test=FILE. Repeatable.
        limit: Number of problems of each task. Default: all.
        num_fewshot: Worked examples. Default: the task's.
        drafter: draft, ngram, or eagle3:path=FOLDER.
        gen_kwargs: Generation arguments that overrule the tasks', such as temperature=0.6,top_p=0.95.
        include_path: Folder of task definitions of your own.
        confirm_run_unsafe_code: Let the harness's code tasks run what models write, without isolation.
            `reprieve bench --task humaneval:path=...` has a sandbox.
        seed: Same seed, same answers.
    """

    tasks: str
    data: tuple[str, ...] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    drafter: str = "draft"
    gen_kwargs: str = ""
    include_path: str | None = None
    confirm_run_unsafe_code: bool = False
    seed: int = 0
    prompt: PromptSettings = field(default_factory=PromptSettings)
