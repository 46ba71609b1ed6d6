"""Feature recipes of heads: named, versioned functions of states that verification computes anyway.

Training and decoding assemble features with the same function, so the two cannot diverge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reprieve.errors import SpecError
from reprieve.heads.settings import FeatureRecipe
from reprieve.types import Evidence, HiddenStates, gather_token


@dataclass(frozen=True)
class TokenStates:
    """Hidden states around n drafted tokens, and two scalars of each distribution.

    `target` and `draft` map an encoding (`draft`, `target`, `previous`) to states by layer.
    """

    target: Mapping[str, HiddenStates]  # [n, Dt] per layer
    draft: Mapping[str, HiddenStates]  # [n, Dd] per layer
    entropy: Tensor | None = None  # [n], nats
    probability: Tensor | None = None  # [n]
    draft_entropy: Tensor | None = None  # [n], nats
    draft_probability: Tensor | None = None  # [n]

    @classmethod
    def of(cls, evidence: Evidence, recipe: FeatureRecipe) -> TokenStates:
        """Extract the inputs of a recipe from a round's evidence."""
        target, draft = {}, {}
        if evidence.node_hidden is not None:
            target["draft"] = evidence.node_hidden
        if evidence.parent_hidden is not None:
            target["previous"] = evidence.parent_hidden
        if evidence.draft_hidden is not None:
            draft["draft"] = evidence.draft_hidden
        target_scalars: tuple[Tensor | None, Tensor | None] = (None, None)
        draft_scalars = target_scalars
        if recipe.num_scalars:
            target_scalars = distribution_scalars(evidence.target_logits, evidence.token_ids)
        if recipe.draft_scalars:
            assert evidence.draft_logits is not None, "the engine refuses this head without a draft's distribution"
            draft_scalars = distribution_scalars(evidence.draft_logits, evidence.token_ids)
        return cls(target, draft, *target_scalars, *draft_scalars)


def distribution_scalars(
    logits: Tensor,  # [..., V], raw
    token_ids: Tensor,  # [...], int64
) -> tuple[Tensor, Tensor]:  # [...] nats, [...]
    """Return the entropy of a model's distribution and its probability of the drafted token (PAD, appendix B)."""
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs.nan_to_num(neginf=0.0)).sum(-1)
    return entropy, gather_token(probs, token_ids)


def assemble(recipe: FeatureRecipe, states: TokenStates) -> Tensor:
    """Return features [n, F], float32: hidden states first, then the recipe's scalars.

    Raises:
        SpecError: the states lack what the recipe reads.
    """
    encodings = recipe.encodings
    parts = []
    for reads, name, layers, read in (
        (recipe.reads_target, "target", recipe.layers, states.target),
        (recipe.reads_draft, "draft", recipe.draft_layers, states.draft),
    ):
        if not reads:
            continue
        for encoding in encodings:
            for layer in layers:
                if encoding not in read or layer not in read[encoding]:
                    raise SpecError(
                        f"a head reads the {name}'s hidden states of layer {layer} that encode the {encoding} token, "
                        "which are not available"
                    )
                parts.append(read[encoding][layer].float())
    for wanted, scalar in (
        (recipe.entropy, states.entropy),
        (recipe.probability, states.probability),
        (recipe.draft_scalars, states.draft_entropy),
        (recipe.draft_scalars, states.draft_probability),
    ):
        if wanted:
            assert scalar is not None
            parts.append(scalar.float().unsqueeze(-1))
    return torch.cat(parts, dim=-1)
