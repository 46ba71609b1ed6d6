"""Settings of CoSpec's reinforcement; defaults are the paper's where it gives them (section 3.4, appendix C.2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from reprieve.errors import SpecError, require_counts, require_range
from reprieve.settings import BUNDLED_TASK, PairSettings, PromptSettings


@dataclass(frozen=True)
class RewardSettings:
    """Rewards of rollouts (CoSpec, section 3.4); the defaults are the paper's (appendix C.2).

    Args:
        risk: alpha: price of an accepted token on a failed rollout, per nat of its surprisal under the target.
        rejection: beta: price of a rejected mismatch on a failed rollout.
        fail_weight: eta_fail: weight of groups in which every rollout failed.
        length: Reward correct rollouts by the span that they accept; otherwise all equally.
        shaped: Penalise failed rollouts by decision; with --no-length as well, only correctness counts (Table 6).
        rebalance: Give correct and failed rollouts of a group equal weight (Eq. 27).
        share_credit: Divide a right rollout's advantage among its decisions, as for a failed one. The paper gives every
            decision the full advantage, times rho.
    """

    risk: float = 1.0
    rejection: float = 0.25
    fail_weight: float = 0.5
    length: bool = True
    shaped: bool = True
    rebalance: bool = True
    share_credit: bool = False

    def __post_init__(self) -> None:
        for name in ("risk", "rejection", "fail_weight"):
            require_range(name, getattr(self, name), 0.0, 1e6)


@dataclass(frozen=True)
class Reinforcement:
    """CoSpec's reinforcement stage (section 3.4 and appendix C.2).

    Args:
        num_problems: Number of problems that serve as prompts, reshuffled for each pass.
        group_size: M: rollouts per prompt.
        prompts_per_update: Prompts whose rollouts make one batch.
        num_updates: Batches of rollouts.
        num_epochs: Passes over a batch.
        steps_per_epoch: Optimiser steps of one pass.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        clip: Clipping range of the probability ratio.
        entropy: beta_H.
        divergence: beta_KL, of the divergence from the initial arbiter.
        max_grad_norm: Norm to clip gradients to.
        lambda_: Of validation; the trained arbiter recommends it.
        num_validation: Number of validation problems, answered before the first update and at regular intervals.
        validate_every: Updates between validations.
        speed_weight: Weight of speed when validation compares arbiters: the best has the
            largest accuracy + speed_weight * tokens per round / (K + 1).
        split: Of the prompts. Default: train if there is one.
        offset: First prompt of the split.
        validation_split: Default: validation if there is one; else the first problems of the prompts' split.
        validation_offset: First problem of that split.
        seed: Of prompts, rollouts and batches.
    """

    num_problems: int = 20_000
    group_size: int = 12
    prompts_per_update: int = 128
    num_updates: int = 200
    num_epochs: int = 4
    steps_per_epoch: int = 1
    learning_rate: float = 5e-5
    weight_decay: float = 0.1
    clip: float = 0.2
    entropy: float = 0.01
    divergence: float = 0.02
    max_grad_norm: float = 1.0
    lambda_: float = 0.6
    num_validation: int = 200
    validate_every: int = 5
    speed_weight: float = 0.05
    split: str | None = None
    offset: int = 0
    validation_split: str | None = None
    validation_offset: int = 0
    seed: int = 0
    rewards: RewardSettings = field(default_factory=RewardSettings)

    def __post_init__(self) -> None:
        require_counts(
            self, "num_problems", "prompts_per_update", "num_updates", "num_epochs", "steps_per_epoch",
            "num_validation", "validate_every",
        )  # fmt: skip
        if self.group_size < 2:
            raise SpecError(f"group_size must be 2 or more: advantages compare rollouts, got {self.group_size!r}")
        require_range("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        require_range("clip", self.clip, 0.0, 1.0, low_open=True)
        require_range("lambda", self.lambda_, 0.0, 1.0)
        for name in ("weight_decay", "entropy", "divergence", "max_grad_norm", "speed_weight"):
            require_range(name, getattr(self, name), 0.0, 1e6)


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a process that decodes rollouts.

    Args:
        task: Task of prompts and validation. Default: that of the bundled pair.
        num_draft_tokens: K of the rollouts. Default: the initial arbiter's.
        temperature: Of target and draft in training rollouts; the paper's is 1.
        validation_temperature: Of validation answers, which are decided by lambda; 0 is greedy.
        draft_temperature: The draft's own, in training and validation. Default: the same as the target's.
    """

    task: str = BUNDLED_TASK
    num_draft_tokens: int | None = None
    temperature: float = 1.0
    validation_temperature: float = 0.0
    draft_temperature: float | None = None
    prompt: PromptSettings = field(default_factory=PromptSettings)
    pair: PairSettings = field(default_factory=PairSettings)

    def __post_init__(self) -> None:
        require_counts(self, "num_draft_tokens")
        for name in ("temperature", "validation_temperature", "draft_temperature"):
            if (value := getattr(self, name)) is not None:
                require_range(name, value, 0.0, 100.0)
