"""Settings of certificates and monitors."""

from __future__ import annotations

from dataclasses import dataclass, field

from reprieve.bench.settings import RunSettings
from reprieve.errors import SpecError, require_choice, require_range, require_whole
from reprieve.settings import AUTO, MAX_PROBLEMS, NumDraftTokens, require_draft_tokens

NET_DROP = "net_drop"
REGRESSION = "regression"


@dataclass(frozen=True)
class Promise:
    """Promise of a certificate.

    Args:
        max_drop: The loss to stay below, in (0, 0.99]: 0.01 is one point.
        confidence: Confidence level of the guarantee, in [0.5, 0.999999].
        loss: net_drop (solved losslessly minus solved with the rule), or regression (solved losslessly, but not with
            the rule).
        max_growth: Growth of the mean answer length to stay below as well: 0.1 is a tenth longer. Default: not bounded.
        max_unfinished: Unfinished answers beyond lossless decoding's to stay below as well: 0.01 is one in a hundred.
            Default: not bounded.
    """

    max_drop: float
    confidence: float = 0.95
    loss: str = NET_DROP
    max_growth: float | None = None
    max_unfinished: float | None = None

    def __post_init__(self) -> None:
        require_range("max_drop", self.max_drop, 0.0, 0.99, low_open=True)
        require_range("confidence", self.confidence, 0.5, 0.999999)
        require_choice("loss", self.loss, (NET_DROP, REGRESSION))
        if self.max_growth is not None:
            require_range("max_growth", self.max_growth, 0.0, 10.0, low_open=True)
        if self.max_unfinished is not None:
            require_range("max_unfinished", self.max_unfinished, 0.0, 0.99, low_open=True)


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
        if self.max_drop is not None:
            require_range("max_drop", self.max_drop, 0.0, 1.0)
        require_range("confidence", self.confidence, 0.5, 0.999999)
