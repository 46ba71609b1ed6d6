"""Tokens that a rule accepts at a position, if it reads only the target's distribution.

The fair comparison for such a rule is the target sampling from that set ("Revisiting Lossy Verification",
arXiv 2607.26627), not the plain target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reprieve.rules.base import Rule, bounded_risk
from reprieve.types import Evidence

_CHUNK = 64  # tokens


def truncated_tokens(
    rule: Rule,
    logits: Tensor,  # [V], raw
    scores: Tensor,  # [V], after temperature, top-k and top-p
) -> Tensor:  # [V], bool
    """Return the mask of tokens that a truncating rule would accept; it always includes the most likely one.

    Such rules accept every token that is more likely than an accepted one. Tokens are therefore tried in order of
    decreasing score, and the search ends with the first chunk that contains a refused one.
    """
    kept = torch.zeros_like(scores, dtype=torch.bool)
    order = scores.argsort(descending=True)
    kept[order[0]] = True
    for token_ids in order.split(_CHUNK):
        shape = (len(token_ids), len(scores))
        evidence = Evidence(
            token_ids=token_ids,
            target_logits=logits.expand(shape),
            greedy=False,
            lossless_accepts=torch.zeros_like(token_ids, dtype=torch.bool),
            target_scores=scores.expand(shape),
        )
        passed = bounded_risk(rule, evidence) <= rule.threshold
        kept[token_ids[passed]] = True
        if not bool(passed.all()):
            break
    return kept
