"""CoSpec's arbiter in the decoding loop: one forward per round over the newly committed tokens and the round's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reprieve.engine.decoder import Advisor
from reprieve.errors import SpecError
from reprieve.heads.arbiter import READINGS, Arbiter
from reprieve.heads.features import TokenStates, assemble
from reprieve.models.arbiter import ArbiterModel, CachedArbiter
from reprieve.needs import Need
from reprieve.rules import Rule
from reprieve.transfers import to_host
from reprieve.types import Block, Evidence


class ArbiterAdvisor:
    """Run an arbiter on every round that has a mismatch (CoSpec, appendix F).

    A round without a mismatch, or whose mismatches another rule accepts (`arbiter|ratio`), needs no advice. The arbiter
    then reads its tokens together with those of the next round that needs advice.
    """

    def __init__(self, model: ArbiterModel) -> None:
        self.arbiter = CachedArbiter(model)

    def start(self, prompt_ids: Sequence[int], *, max_length: int, num_draft_tokens: int) -> None:
        """Begin an answer.

        Raises:
            ContextOverflowError: the region of a last round could exceed the draft's positions.
        """
        # A context of max_length - left tokens is followed by 2 min(K, left - 1) + 3 more.
        self.arbiter.start(prompt_ids, num_positions=max_length + num_draft_tokens + 2)

    def advise(self, block: Block, evidence: Evidence, settled: Tensor) -> Tensor:
        """Return pi(accept) of each drafted token, [N].

        It is 1 for the target's own tokens (Eq. 13 and 14), and for all tokens if all are settled.

        Raises:
            SpecError: a tree.
        """
        if not block.is_chain:
            raise SpecError("the arbiter needs chains, got a tree")
        drafted, own, passed = to_host(block.token_ids, evidence.own_ids, settled)
        if all(passed):
            return torch.ones(block.num_tokens, device=block.token_ids.device)
        reads = self.arbiter.model.shape.num_readings
        readings = assemble(READINGS, TokenStates.of(evidence, READINGS)) if reads else None
        ids = ([int(token_id) for token_id in drafted], [int(token_id) for token_id in own])
        logits = self.arbiter.judge(*ids, readings)
        matched = block.token_ids == evidence.own_ids
        return logits.sigmoid().to(matched.device).masked_fill(matched, 1.0)

    def commit(self, token_ids: list[int]) -> None:
        self.arbiter.commit(token_ids)


def make_advisor(rule: Rule, draft: PreTrainedModel | None) -> Advisor | None:
    """Return the advisor that a rule needs, over the draft's weights; None for rules that need none.

    Raises:
        SpecError: a rule with two arbiters, or no draft.
    """
    if Need.ADVICE not in rule.traits.needs:
        return None
    arbiters = [head for _, head in rule.heads if isinstance(head, Arbiter)]
    if len(arbiters) != 1:
        raise SpecError(f"rule {rule.spec} must name one arbiter, got {len(arbiters)}")
    if draft is None:
        raise SpecError(f"rule {rule.spec} needs the draft its arbiter was trained on; name it with --draft")
    return ArbiterAdvisor(build_arbiter(arbiters[0], draft))


def build_arbiter(arbiter: Arbiter, draft: PreTrainedModel) -> ArbiterModel:
    """Build a trained arbiter's network over the draft's weights.

    Raises:
        SpecError: it was trained on a draft of another shape.
    """
    model = ArbiterModel(draft, arbiter.shape)
    model.load_own(arbiter.tensors)
    return model
