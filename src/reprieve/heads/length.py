"""Draft length head: predicts the acceptance of the next drafted token (FSD, section 7.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from reprieve.bundles import bundle_of
from reprieve.errors import ReprieveError, SpecError, require_range, require_whole
from reprieve.heads.artefact import Artefact, register_head
from reprieve.identity import digest
from reprieve.rules import Rule
from reprieve.settings import AUTO, MAX_DRAFT_TOKENS, NumDraftTokens, length_head_path, require_draft_tokens

ANY_RULE = "lossless"
SCALARS = ("bias", "log_prob", "place", "recent", "dial", "temperature")


@register_head
@dataclass(frozen=True)
class LengthHead(Artefact):
    """Two logistic regressions on drafting states, and the acceptance probability below which drafting stops.

    The first predicts the acceptance of the token just drafted, the second that of the next one if this one is
    accepted; both are conditional on the acceptance of all earlier ones. FSD proposes such a head without specifying
    it.

    Args:
        hidden_weight: [2, D], on the draft's last hidden state that predicted the token, after the final norm.
        scalar_weight: [2, 6], on `SCALARS`: 1, the draft's log-probability of the token, its position in the block
            (from 0, in eighths, at most 1), the share of recently accepted tokens, the rule's dial, and the target's
            temperature. Standardisation is folded into both.
        rule: name of the rule whose acceptance it predicts.
        lowest, highest: dial values it was trained for; both 0 for a rule without a dial.
        price: acceptance probability below which another token costs more than it gains, (0, 1].
        most: longest block.
        training: training data, measured forward times, and results on held-out problems.
    """

    kind: ClassVar[str] = "length"
    purpose: ClassVar[str] = (
        "Predicts after every drafted token how likely another is to be accepted, from the draft's own hidden state "
        "(proposed in section 7.1 of FSD). Reprieve ends a block when drafting another token does not pay off."
    )

    use: ClassVar[str | None] = "'RULE@K=auto:path=THIS'"

    hidden_weight: Tensor
    scalar_weight: Tensor
    rule: str
    lowest: float
    highest: float
    price: float
    most: int
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.require_numbers()
        if self.hidden_weight.ndim != 2 or len(self.hidden_weight) != 2:
            raise SpecError(f"hidden_weight must be of shape [2, D], got {list(self.hidden_weight.shape)}")
        if self.scalar_weight.shape != (2, len(SCALARS)):
            raise SpecError(f"scalar_weight must be of shape [2, {len(SCALARS)}], got {list(self.scalar_weight.shape)}")
        require_range("price", self.price, 0.0, 1.0, low_open=True)
        require_range("lowest", self.lowest, -1e9, 1e9)
        require_range("highest", self.highest, self.lowest, 1e9)
        require_whole("most", self.most, 1, MAX_DRAFT_TOKENS)

    @property
    def reads_draft(self) -> bool:
        return True

    def facts(self) -> dict[str, str]:
        dial = "" if self.lowest == self.highest == 0 else f" at {self.lowest:g}"
        dial += f" to {self.highest:g}" if self.lowest < self.highest else ""
        return {"rule": self.rule + dial, "price": f"{self.price:.2g}", "longest block": str(self.most)}

    def covers(self, rule: Rule) -> bool:
        """Return True if it serves this rule at this value of its dial.

        A head for lossless decoding serves every rule: rescuing rules accept all tokens that lossless decoding accepts.
        """
        if self.rule == ANY_RULE:
            return True
        if rule.name != self.rule:
            return False
        return rule.dial is None or (rule.dial_value is not None and self.lowest <= rule.dial_value <= self.highest)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that affects decisions: the price is from timings and can differ between equal weights."""
        decides = (self.rule, self.lowest, self.highest, self.price, self.most)
        return digest(f"{super().fingerprint} {decides!r}".encode())

    def certified(self) -> str:
        """Return its name in a certificate, in place of K."""
        return f"{AUTO}:{self.fingerprint}"

    def require_rule(self, rule: Rule, name: str) -> None:
        """Refuse another rule, or a dial value it was not trained for.

        Raises:
            SpecError: names both.
        """
        if not self.covers(rule):
            raise SpecError(f"length head {name!r} was trained for {self.facts()['rule']}, not for {rule.spec}")


def bundled_length_head(rule: Rule, target: str) -> LengthHead | None:
    """Return a bundled target's draft length head for a rule; None if it has none.

    It serves all thresholds; outside its training range it uses the nearest one. Rules without a head use that of
    lossless decoding.
    """
    bundle = bundle_of(target)
    names = {} if bundle is None else bundle.heads
    source = names.get(f"length-{rule.name}") or names.get(f"length-{ANY_RULE}")
    return None if source is None else LengthHead.from_pretrained(source)


def draft_tokens_for(num_draft_tokens: NumDraftTokens, rule: Rule) -> NumDraftTokens:
    """Return the draft length for one of several rules; a length head of another rule becomes `auto`.

    Raises:
        SpecError: a specification that cannot be read.
        ReprieveError: a head that cannot be loaded.
    """
    require_draft_tokens(num_draft_tokens)
    if named := length_head_path(num_draft_tokens):
        return num_draft_tokens if load_length_head(named).covers(rule) else AUTO
    return num_draft_tokens


def load_length_head(name: str) -> LengthHead:
    """Return the head of `auto:path=NAME`; errors name it in that form."""
    try:
        return LengthHead.from_pretrained(name)
    except ReprieveError as error:
        raise ReprieveError(f"num_draft_tokens auto:path={name}: {error}") from None
