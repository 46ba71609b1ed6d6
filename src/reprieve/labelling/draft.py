"""The draft as miners see it: what it would have put at every place of a response."""

from __future__ import annotations

import torch

from reprieve.models.cached_model import CachedModel, shared_length
from reprieve.models.draws import GumbelNoise, gumbel_choice
from reprieve.models.sampling import Sampler


class DraftReader:
    """Reads one problem's responses in parallel forwards; what two of them share is read once.

    Args:
        model: the draft, with a cache of its own.
        sampler: temperature, top-k and top-p.
        noise: makes sampling repeatable; None when greedy.
    """

    def __init__(self, model: CachedModel, sampler: Sampler, noise: GumbelNoise | None = None) -> None:
        self.model = model
        self.sampler = sampler
        self.noise = noise
        self._predicted: list[int] = []  # after each cached token from the prompt's last on

    @torch.inference_mode()
    def predict(self, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
        """The draft's own token at every place of the response, given the response before it."""
        text = [*prompt_ids, *response_ids]
        first = len(prompt_ids) - 1
        shared = min(shared_length(text[:-1], self.model.cached_ids), first + len(self._predicted))
        if shared <= first:
            self.model.start(prompt_ids[:-1], reuse_prefix=True)
            shared, self._predicted = first, []
        self.model.keep(shared)
        del self._predicted[shared - first :]
        if shared < len(text) - 1:
            logits, _ = self.model.forward(text[shared:-1])
            self._predicted += self._choose(logits, text, shared)
        return self._predicted[: len(response_ids)]

    def _choose(self, logits: torch.Tensor, text: list[int], shared: int) -> list[int]:
        scores = self.sampler.target_scores(logits)
        if self.noise is None:
            return scores.argmax(-1).tolist()
        return gumbel_choice(scores, self.noise.keys(text[:-1], shared + 1)).tolist()
