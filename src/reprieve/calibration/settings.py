"""What is to be promised, and what is measured once per target."""

from __future__ import annotations

from dataclasses import dataclass

from reprieve.errors import require_choice, require_range, require_whole
from reprieve.heads.settings import BUCKETS

NET_DROP = "net_drop"
REGRESSION = "regression"


@dataclass(frozen=True)
class Promise:
    """What is to be certified.

    Args:
        max_drop: The loss to stay below, in (0, 1): 0.01 is one point.
        confidence: Of the promise, in [0.5, 1).
        loss: net_drop (solved strictly minus solved relaxed), or regression (solved strictly and failed relaxed).
    """

    max_drop: float
    confidence: float = 0.95
    loss: str = NET_DROP

    def __post_init__(self) -> None:
        require_range("max_drop", self.max_drop, 0.0, 0.99, low_open=True)
        require_range("confidence", self.confidence, 0.5, 0.999999)
        require_choice("loss", self.loss, (NET_DROP, REGRESSION))


@dataclass(frozen=True)
class LtsRecipe:
    """What is calibrated of ARC-Decode's bound, and how.

    Args:
        delta: Share of positions the bound may miss, (0, 0.5]; the paper uses 0.05.
        active: Size of the active vocabulary, the paper's top-K: candidates are drawn from the target's k most likely
            tokens but the first, and divergences taken on both distributions' k most likely. 2 or more.
        candidates: likely (the paper's: uniform among those), or drafted: what the draft would have put there.
        safety: alpha, the factor on the log-probability side; 1 or more.
        bucket_by: none, entropy, distance or margin.
        buckets: Number of equally filled buckets.
        confidence: Replace each empirical quantile by the Clopper-Pearson upper limit for it at this confidence.
        seed: Of the answers and the candidates.
    """

    delta: float = 0.05
    active: int = 10
    candidates: str = "likely"
    safety: float = 1.0
    bucket_by: str = "none"
    buckets: int = 4
    confidence: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_range("delta", self.delta, 0.0, 0.5, low_open=True)
        require_whole("active", self.active, 2)
        require_choice("candidates", self.candidates, ("likely", "drafted"))
        require_range("safety", self.safety, 1.0, 1e6)
        require_choice("bucket_by", self.bucket_by, BUCKETS)
        require_whole("buckets", self.buckets, 1)
        if self.confidence is not None:
            require_range("confidence", self.confidence, 0.5, 0.999999)
