"""Readings: values from verification for the drafted tokens of recorded rounds, for arbiters that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from reprieve.engine import Pair
from reprieve.heads.arbiter import READINGS
from reprieve.heads.features import TokenStates, assemble, distribution_scalars
from reprieve.models.arbiter import ArbitrationRound
from reprieve.models.cached_model import CachedModel
from reprieve.types import HiddenStates, select_rows


class RoundReader:
    """Runs both models over recorded rounds to recompute the readings that a decoder would provide."""

    def __init__(self, pair: Pair) -> None:
        self._target = pair.cached_target(READINGS.layers)
        self._draft = pair.cached_draft(READINGS.draft_layers)
        self._dtype = pair.target.dtype

    def read(self, context_ids: Sequence[int], rounds: Sequence[ArbitrationRound]) -> list[ArbitrationRound]:
        """Return the rounds with their readings. Each text is read once if rounds are ordered by context length.

        Args:
            context_ids: prompt and committed tokens, up to the last round's context.
        """
        return [
            dataclasses.replace(
                arbitration, readings=self._one(context_ids[: arbitration.context_length], arbitration.draft_ids)
            )
            for arbitration in rounds
        ]

    def _one(self, context_ids: Sequence[int], draft_ids: Sequence[int]) -> Tensor:  # [K, F]
        with torch.inference_mode():
            target_read, draft_read = (_read(model, context_ids, draft_ids) for model in (self._target, self._draft))
            states = TokenStates({"draft": target_read[0]}, {"draft": draft_read[0]}, *target_read[1:], *draft_read[1:])
            readings = assemble(READINGS, states)  # on the host: the models can be on different devices
        # Cloned outside of inference mode, because autograd needs it. In the target's precision, because readings
        # are cached for all epochs, which takes gigabytes for a large target.
        return readings.clone().to(self._dtype)


def _read(
    model: CachedModel, context_ids: Sequence[int], draft_ids: Sequence[int]
) -> tuple[HiddenStates, Tensor, Tensor]:
    """Return states that encode the drafted tokens, entropies of the judging distributions, and token probabilities.

    All on the host.
    """
    model.start(list(context_ids[:-1]), reuse_prefix=True)
    logits, hidden = model.forward([context_ids[-1], *draft_ids], num_rows=len(draft_ids) + 1)
    model.keep(len(context_ids))
    states = select_rows(hidden, slice(1, None))
    assert states is not None
    token_ids = torch.tensor(list(draft_ids), device=logits.device)
    entropy, probability = distribution_scalars(logits[:-1], token_ids)
    return {layer: of.cpu() for layer, of in states.items()}, entropy.cpu(), probability.cpu()


def num_readings(pair: Pair) -> int:
    """Return the number of readings per token."""
    assert pair.draft is not None
    sizes = [int(model.config.get_text_config().hidden_size) for model in (pair.target, pair.draft)]
    return sum(sizes) + READINGS.num_scalars
