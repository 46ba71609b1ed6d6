"""Fuzzy speculative decoding (FSD): accept where draft and target distributions are close."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import SpecError, require_choice, require_counts, require_range
from reprieve.rules.base import Dial, Rule, Traits, register_rule
from reprieve.rules.distributions import js_divergence, kl_divergence, total_variation
from reprieve.types import Evidence, Need

_SMALLEST = 1e-30  # the divergence of equal distributions is 0, or below by rounding


def top_k_union(target_probs: Tensor, draft_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Restrict both distributions to the union of their k most likely tokens and normalise: [..., V] each."""
    size = target_probs.shape[-1]
    keep = torch.zeros(target_probs.shape, dtype=torch.bool, device=target_probs.device)
    for probs in (target_probs, draft_probs):
        keep = keep.scatter(-1, probs.topk(min(k, size), dim=-1).indices, True)
    target, draft = target_probs * keep, draft_probs * keep
    return target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)


def fuzzy_divergence(
    target_probs: Tensor,  # [..., V]
    draft_probs: Tensor,  # [..., V]
    *,
    divergence: str = "js",
    form: str = "paper",
    log_base: float = 2.0,
    k: int | None = None,
) -> Tensor:  # [...], 0 or more
    """Return the divergence that FSD compares with its threshold, [...] (appendix A), or that of its released code.

    `paper`: KL(target || draft), Jensen-Shannon or total variation. `released`, the authors' code: KL(draft || target)
    for `kl`, and for `js` (KL(m || target) + KL(m || draft)) / 2 in nats, where m is the mean of both distributions.
    """
    if k is not None:
        target_probs, draft_probs = top_k_union(target_probs, draft_probs, k)
    if divergence == "tv":
        return total_variation(target_probs, draft_probs)
    if form == "released":
        if divergence == "kl":
            return kl_divergence(draft_probs, target_probs)
        middle = (target_probs + draft_probs) / 2
        return (kl_divergence(middle, target_probs) + kl_divergence(middle, draft_probs)) / 2
    nats = js_divergence if divergence == "js" else kl_divergence
    return nats(target_probs, draft_probs) / math.log(log_base)


_KL_DIAL = Dial("threshold", strictest=0.0, stops=(0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))


@register_rule
@dataclass(frozen=True)
class FuzzyRule(Rule):
    """Accept where the divergence of draft and target is at most `threshold` (FSD, section 4).

    Replaces the lossless check: a drafted token that matches the target is refused where the distributions differ,
    and after a refusal the target's own distribution is sampled, not the residual.

    Args:
        threshold: largest accepted divergence, 0 or more; 0 accepts nothing. The paper writes "less than T".
        divergence: `js` (the paper's choice), `kl` or `tv`.
        form: `paper`, or `released` for the authors' code, for which thresholds were published.
        log_base: base of the logarithm, for `form=paper`; the paper does not state it. With 2, JS is in [0, 1].
        k: restrict both distributions to the union of their k most likely tokens; None for the whole vocabulary.

    Relaxed: an answer of T tokens diverges from the target by at most T * P(draft used) * threshold (appendix B), if
    drafts are sampled and `divergence` is `tv`, or `kl` with `form=released`; see `sequence_bound`.
    """

    name = "fuzzy"
    own_dial = Dial("threshold", strictest=0.0, stops=(0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0))
    own_traits = Traits(needs=frozenset({Need.DRAFT_PROBS}), replaces=True)
    origin = "FSD, Fuzzy Speculative Decoding"

    threshold: float = 0.4
    divergence: str = "js"
    form: str = "paper"
    log_base: float = 2.0
    k: int | None = None

    def __post_init__(self) -> None:
        require_choice("divergence", self.divergence, ("js", "kl", "tv"))
        require_choice("form", self.form, ("paper", "released"))
        require_range("threshold", self.threshold, 0.0, math.inf)
        if not 1 < self.log_base < math.inf:
            raise SpecError(f"log_base must be finite and above 1, got {self.log_base!r}")
        require_counts(self, "k")

    @property
    def dial(self) -> Dial:
        """Dial with values for the divergence: KL is unbounded, the others are at most 1."""
        return _KL_DIAL if self.divergence == "kl" else self.own_dial

    def risk(self, evidence: Evidence) -> Tensor:
        """Return the divergence at each token's position, [...], above 0."""
        assert evidence.draft_probs is not None, "the engine refuses fuzzy without draft probabilities"
        divergence = fuzzy_divergence(
            evidence.target_probs,
            evidence.draft_probs,
            divergence=self.divergence,
            form=self.form,
            log_base=self.log_base,
            k=self.k,
        )
        return divergence.clamp_min(_SMALLEST)

    def sequence_bound(self, num_drafted: float) -> float | None:
        """Return drafted tokens times threshold (appendix B), in the unit of the divergence, or None.

        Total variation adds up along an answer, and so does KL(answers || target) over the prefixes of the answers
        (`form=released` with `kl`). Jensen-Shannon and KL(target || answers) do not and can exceed the product. A top-k
        union bounds neither.
        """
        adds_up = self.divergence == "tv" or (self.divergence == "kl" and self.form == "released")
        return num_drafted * self.threshold if adds_up and self.k is None else None
