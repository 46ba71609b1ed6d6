"""Settings of the miners."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reprieve.backends.settings import EngineSettings
from reprieve.errors import SpecError, require_choice, require_counts, require_range, require_whole
from reprieve.settings import (
    MAX_DRAFT_TOKENS,
    MAX_SEED,
    PairSettings,
    ProblemSettings,
    SamplingParams,
    SamplingSettings,
)
from reprieve.specs import parse_spec

MOST_CANDIDATES = 20  # per position that vLLM returns, unless started with more (--max-logprobs)


@dataclass(frozen=True)
class MiningSettings(ProblemSettings):
    """Settings that determine labels and mining speed.

    Args:
        seed: Same seed, same labels.
        num_in_flight: Number of problems mined concurrently. Default: 16 (pivot 4); on servers 256 (autojudge) or 64.
    """

    miner: ClassVar[str]
    usual_in_flight: ClassVar[int] = 16
    usual_on_servers: ClassVar[int] = 256
    own: ClassVar[tuple[str, ...]]  # the miner's settings that labels in one store must share

    split: str = "train"
    limit: int = 100
    seed: int = 0
    num_in_flight: int | None = None
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("seed", self.seed, 0, MAX_SEED)
        require_whole("num_in_flight", self.num_in_flight, 1, 4096, optional=True)
        if self.engine.batched:
            raise SpecError(
                f"engine must not be {self.engine.engine!r}: on --engine local, mining is batched already, and "
                "--in-flight sets how many problems share a batch"
            )

    def _require_walk(self) -> None:
        """Refuse a walk that servers do not support."""
        if not self.engine.local and not 1 <= self.num_candidates <= MOST_CANDIDATES:
            raise SpecError(
                f"top_k must be in [1, {MOST_CANDIDATES}] where the target is on servers, which return no more "
                f"log-probabilities per position; use --engine local for more, got {self.num_candidates}"
            )

    @property
    def in_flight(self) -> int:
        """Number of problems in flight."""
        return self.num_in_flight or (self.usual_in_flight if self.engine.local else self.usual_on_servers)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters, for texts of any length."""
        return SamplingParams(**vars(self.sampling), seed=self.seed)

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens per position that cover every token that can be sampled."""
        return 1 if self.sampling.greedy else self.sampling.top_k

    @property
    def by_draft(self) -> bool:
        """True if the draft model's tokens are labelled."""
        return True

    @property
    def rows_per_problem(self) -> int:
        """Number of a problem's texts that are continued at once."""
        return 1

    @property
    def options(self) -> dict[str, Any]:
        """The miner's own settings for the label store's manifest, without unused ones."""
        return {name: value for name in self.own if (value := getattr(self, name)) is not None}

    @property
    def judge(self) -> str | None:
        """Language model that compares responses, so that the task needs no reference answers."""
        return None

    def problem_seed(self, problem_id: str) -> int:
        """Return a random seed for a problem, the same in every run and on every worker."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}:{problem_id}".encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True)
class AutoJudgeMining(MiningSettings):
    """AutoJudge's miner (Algorithm 1). Above temperature 0 it samples with Gumbel noise.

    Args:
        variant: search (Algorithm 1), or naive (every mismatch alone).
        drafter: Drafter whose tokens are labelled: draft, or eagle3:path=FOLDER (the head's first drafted token). A
            trained head only suits the drafter whose tokens it was trained on.
        judge: Compares open-ended responses: openai:model=NAME,url=ADDRESS.
        api_url: Address of an OpenAI-compatible server with the target; --target is its name there.
    """

    miner: ClassVar[str] = "autojudge"
    own: ClassVar[tuple[str, ...]] = ("variant", "judge")

    variant: str = "search"
    drafter: str = "draft"
    judge: str | None = None
    api_url: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("variant", self.variant, ("search", "naive"))
        if not self.by_draft:
            name, parameters = parse_spec(self.drafter, what="drafter")
            require_choice("drafter", name, ("draft", "eagle3"))
            if name == "draft" or parameters.keys() - {"path"}:
                raise SpecError(f"drafter must be draft, eagle3, or eagle3:path=FOLDER, got {self.drafter!r}")
            if not (self.sampling.greedy and self.engine.local and self.api_url is None):
                raise SpecError(
                    f"drafter must be draft if the target is on a server or sampled, got {self.drafter!r}: EAGLE-3 "
                    "reads the target's states and proposes its most likely tokens instead of sampling"
                )
        if self.api_url is not None and (not self.sampling.greedy or self.pair.draft is None):
            raise SpecError("an API target requires temperature 0 and a draft by name (--draft)")
        if self.api_url is not None and not self.engine.local:
            raise SpecError("api_url and engine both say where the target is: give one of them")
        if not self.engine.local and not self.sampling.greedy:
            raise SpecError(
                "temperature must be 0 on servers: sampled AutoJudge keys its draws by the prefix, which servers do "
                f"not support; use --engine local, got {self.sampling.temperature:g}"
            )

    @property
    def by_draft(self) -> bool:
        return self.drafter == "draft"


@dataclass(frozen=True)
class PivotMining(MiningSettings):
    """PAD's miner (its Algorithm 1): rollouts on both sides of every token that speculative sampling rejects.

    Args:
        num_rollouts: N: rollouts on each side of a rejected token.
        alpha: A token is a pivot if its share of correct rollouts is below alpha times the share without it, 0 to 1.
        soundness: Judge of non-pivots: equations, or openai:model=NAME,url=ADDRESS.
    """

    miner: ClassVar[str] = "pivot"
    own: ClassVar[tuple[str, ...]] = ("num_rollouts", "alpha", "soundness")
    usual_in_flight: ClassVar[int] = 4
    usual_on_servers: ClassVar[int] = 64  # each keeps a draft cache and requests N rollouts at a time

    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=0.6, top_p=0.95, top_k=20))
    num_rollouts: int = 8
    alpha: float = 0.8
    soundness: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling.greedy:
            raise SpecError("temperature must be above 0 for pivot mining, which labels by rollouts, got 0")
        require_whole("num_rollouts", self.num_rollouts, 1, 4096)
        require_range("alpha", self.alpha, 0.0, 1.0)
        self._require_walk()

    @property
    def rows_per_problem(self) -> int:
        return self.num_rollouts  # a label requests 2N rollouts; N rows keep the batch full


@dataclass(frozen=True)
class TraceMining(MiningSettings):
    """CoSpec's traces (appendix C.1): plain speculative rounds, with labels for the better side of a mismatch.

    Args:
        num_draft_tokens: K of the rounds.
        max_mismatches: Maximum number of mismatches labelled per round, starting with the first.
        num_rollouts: Rollouts on each side of a mismatch; always 1 if they are greedy.
        greedy_branches: Continue both sides greedily even if the rounds are sampled.
        tie: Soft label for accepting the draft's token if both sides end equally well.
        judge: Judge that scores both candidates instead of rollouts: openai:model=NAME,url=ADDRESS.
    """

    miner: ClassVar[str] = "arbitration"
    usual_on_servers: ClassVar[int] = 64  # each keeps a draft cache
    own: ClassVar[tuple[str, ...]] = (
        "num_draft_tokens", "max_mismatches", "num_rollouts", "greedy_branches", "tie", "judge",
    )  # fmt: skip

    num_draft_tokens: int = 16
    max_mismatches: int = 4
    num_rollouts: int = 4
    greedy_branches: bool = False
    tie: float = 0.8
    judge: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        require_counts(self, "max_mismatches", "num_rollouts")
        require_range("tie", self.tie, 0.0, 1.0)
        self._require_walk()

    @property
    def continues_greedily(self) -> bool:
        """True if all rollouts of a branch are equal, so that one is enough."""
        return self.greedy_branches or self.sampling.greedy

    @property
    def rows_per_problem(self) -> int:
        return 4  # of a problem's branches, continued at once
