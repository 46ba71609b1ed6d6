"""Request fields that select rules on a server, and rules that vLLM cannot run."""

from __future__ import annotations

from reprieve.errors import SpecError
from reprieve.heads.folds import FoldedHead
from reprieve.needs import Need
from reprieve.rules import Rule

THRESHOLD, SWITCH, LEVEL = "reprieve_threshold", "reprieve_rule", "reprieve_leniency"
REQUIRE = "reprieve_require"  # selects nothing: the request is refused if it would get a weaker guarantee
PREFIX = "reprieve_"
CHOICES = (THRESHOLD, SWITCH, LEVEL)
FIELDS = (*CHOICES, REQUIRE)


def require_handed_out(rule: Rule) -> None:
    """Refuse a rule that vLLM cannot run: one with inputs that vLLM does not provide, or with out-of-fold heads.

    Raises:
        SpecError: names the input or the head.
    """
    for need, words in ((Need.DRAFT_HIDDEN, "the draft's hidden states"), (Need.ADVICE, "an advisor")):
        if need in rule.traits.needs:
            raise SpecError(f"rule {rule.spec} needs {words}, which vLLM does not hand out; use the local engine")
    if other := set(rule.traits.target_layers) - {-1}:
        raise SpecError(
            f"rule {rule.spec} reads layer {min(other)}; vLLM hands out the last one (-1) only: train a "
            "head on that one, or use the local engine"
        )
    for name, head in rule.heads:
        if isinstance(head, FoldedHead):
            raise SpecError(f"head {name!r} is out-of-fold: serve one head, not its folds")
