"""Rules on the gap to the target's best token: margin, ratio, and a probability floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import require_choice, require_counts, require_range
from reprieve.rules.base import Dial, Rule, register_rule
from reprieve.rules.distributions import token_rank
from reprieve.types import Evidence, gather_token


def margin_risk(
    target_logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...], int64
) -> Tensor:  # [...], nats, 0 or more
    """Return the gap between the target's best token and the drafted one, in log-probabilities or logits."""
    return target_logits.amax(-1) - gather_token(target_logits, token_ids)


def beyond_top_k(risk: Tensor, evidence: Evidence, k: int | None) -> Tensor:
    """Set the risk to infinity for tokens outside the target's k most likely; unchanged if k is None."""
    if k is None:
        return risk
    return torch.where(token_rank(evidence.scores, evidence.token_ids) <= k, risk, math.inf)


def _nats_below(share: float) -> float:
    """Return a share in nats below 1, as a threshold of risks of 0 or more; at a share of 1, nothing passes."""
    if share >= 1.0:
        return -1.0
    return -math.log(share) if share > 0 else math.inf


@register_rule
@dataclass(frozen=True)
class MarginRule(Rule):
    """Accept a token close enough to the target's best one, among the k most likely.

    Args:
        delta: largest gap. With `scale=log`, log p(best) - log p(token) in nats, 0 or more; with `scale=prob`, the
            difference of probabilities, 0 to 1 (TensorRT-LLM's relaxed acceptance recommends k = 10, delta = 0.6).
        k: cap on the token's rank; None for no cap. MARS's top-2 gap is `scale=log, k=2`.

    Relaxed: with `scale=prob`, a delta of 1 accepts all k tokens. The original systems are greedy only.
    """

    name = "margin"
    own_dial = Dial("delta", strictest=0.0, stops=(0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0))
    truncates = True
    origin = "shipped by TensorRT-LLM (relaxed thinking); MARS's top-2 gap"

    delta: float = 1.0
    k: int | None = None
    scale: str = "log"

    def __post_init__(self) -> None:
        require_choice("scale", self.scale, ("log", "prob"))
        require_range("delta", self.delta, 0.0, 1.0 if self.scale == "prob" else math.inf)
        require_counts(self, "k")

    @property
    def threshold(self) -> float:
        # A gap of 0 is the best token itself: nothing to rescue, also when sampling.
        return self.delta if self.delta > 0 else -1.0

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the gap in the chosen scale, [...]; infinite beyond the k most likely."""
        if self.scale == "log":
            gap = margin_risk(evidence.scores, evidence.token_ids)
        else:
            gap = margin_risk(evidence.target_probs, evidence.token_ids)
        return beyond_top_k(gap, evidence, self.k)


@register_rule
@dataclass(frozen=True)
class RatioRule(Rule):
    """Accept a token with at least `ratio` times the best token's probability, among the k most likely.

    Source: vLLM pull requests 22238, 43184 and 45229 (ratio 0.5, k 3; not merged).

    Relaxed: no bound on the output distribution.
    """

    name = "ratio"
    own_dial = Dial("ratio", strictest=1.0, stops=(1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01))
    truncates = True
    origin = "vLLM pull requests 22238, 43184, 45229 (not merged)"

    ratio: float = 0.5
    k: int | None = 3

    def __post_init__(self) -> None:
        require_range("ratio", self.ratio, 0.0, 1.0)
        require_counts(self, "k")

    @property
    def threshold(self) -> float:
        return _nats_below(self.ratio)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return log(p(best) / p(token)) in nats, [...]; infinite beyond the k most likely."""
        return beyond_top_k(margin_risk(evidence.scores, evidence.token_ids), evidence, self.k)


@register_rule
@dataclass(frozen=True)
class FloorRule(Rule):
    """Accept a token with at least `min_prob` under the target (SGLang's single-token threshold).

    Mostly used to restrict another rule: `judge & floor` (PAD refuses tokens below 1e-4).

    Relaxed: no bound on the output distribution.
    """

    name = "floor"
    own_dial = Dial("min_prob", strictest=1.0, stops=(1.0, 0.5, 0.3, 0.1, 0.05, 0.01, 0.001, 0.0001))
    truncates = True
    origin = "shipped by SGLang (single-token threshold); PAD's floor of 1e-4"

    min_prob: float = 1e-4

    def __post_init__(self) -> None:
        require_range("min_prob", self.min_prob, 0.0, 1.0)

    @property
    def threshold(self) -> float:
        return _nats_below(self.min_prob)

    def risk(self, evidence: Evidence) -> Tensor:
        """Return -log p(token) in nats, [...]."""
        return -evidence.token_log_probs
