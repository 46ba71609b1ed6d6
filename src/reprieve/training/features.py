"""Features of labelled tokens, from one parallel forward per problem and model.

Verification computes states in parallel, so heads are trained on parallel states (AutoJudge, appendix C). The final
response is a chain; tokens that were tried but not kept are leaves of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reprieve.engine import Pair
from reprieve.errors import SpecError
from reprieve.heads.features import TokenStates, assemble, distribution_scalars
from reprieve.heads.settings import FeatureRecipe
from reprieve.mining.records import Mismatch, ProblemLabels
from reprieve.models.cached_model import CachedModel, HiddenLayers, ResponseTree
from reprieve.types import HiddenStates

Progress = Callable[[int, int], None]  # finished and all problems


@dataclass(frozen=True)
class LabelledTokens:
    """All labelled mismatches of a store, with the values that verification would have."""

    states: TokenStates
    important: np.ndarray  # [n], bool
    problem_ids: np.ndarray  # [n], str
    target_log_probs: np.ndarray  # [n], of the drafted token
    draft_probs: np.ndarray  # [n], of the drafted token under the draft; NaN without a draft
    gains: np.ndarray  # [n], utility of the draft's side minus the target's; NaN without utilities

    def features(self, recipe: FeatureRecipe) -> np.ndarray:
        """Return features [n, F], float32."""
        return assemble(recipe, self.states).numpy()


@dataclass(frozen=True)
class _Forward:
    """States and logits of one model around the mismatches of one problem."""

    hidden: Mapping[str, HiddenStates]  # by encoding
    entropy: Tensor  # [n], of its distribution
    probability: Tensor  # [n], of the drafted token


def collect(
    pair: Pair,
    problems: Sequence[ProblemLabels],
    *,
    layers: HiddenLayers = (-1,),
    draft_layers: HiddenLayers = (-1,),
    encodings: Sequence[str] = ("draft", "target", "previous"),
    progress: Progress = lambda done, total: None,
) -> LabelledTokens:
    """Run target and draft over every problem.

    Args:
        layers: of the target; `draft_layers` of the draft, () to skip the draft.
        encodings: tokens whose states are kept (`FeatureRecipe.encodings`).

    Raises:
        SpecError: no labelled mismatches.
    """
    target = pair.cached_target(layers)
    draft = pair.cached_draft(draft_layers) if draft_layers else None
    parts: list[tuple[_Forward, _Forward | None]] = []
    kept: list[tuple[str, Mismatch]] = []
    for number, problem in enumerate(problems):
        mismatches = problem.labelled()
        if mismatches:
            parts.append((_read(target, problem, encodings), _read(draft, problem, encodings) if draft else None))
            kept += [(problem.problem_id, mismatch) for mismatch in mismatches]
        progress(number + 1, len(problems))
    if not kept:
        raise SpecError("labels must hold at least one labelled mismatch, got none")
    probability = torch.cat([target_side.probability for target_side, _ in parts])
    read = [draft_side for _, draft_side in parts if draft_side]
    draft_entropy = torch.cat([draft_side.entropy for draft_side in read]) if read else None
    draft_probability = torch.cat([draft_side.probability for draft_side in read]) if read else None
    states = TokenStates(
        target=_join([target_side.hidden for target_side, _ in parts]),
        draft=_join([draft_side.hidden for draft_side in read]),
        entropy=torch.cat([target_side.entropy for target_side, _ in parts]),
        probability=probability,
        draft_entropy=draft_entropy,
        draft_probability=draft_probability,
    )
    return LabelledTokens(
        states=states,
        important=np.array([bool(mismatch.important) for _, mismatch in kept]),
        problem_ids=np.array([problem_id for problem_id, _ in kept]),
        target_log_probs=probability.clamp_min(1e-45).log().numpy(),
        draft_probs=np.full(len(kept), np.nan) if draft_probability is None else draft_probability.numpy(),
        gains=np.array([_gain(mismatch) for _, mismatch in kept]),
    )


def _gain(mismatch: Mismatch) -> float:
    if mismatch.base_utility is None or mismatch.candidate_utility is None:
        return float("nan")
    return mismatch.candidate_utility - mismatch.base_utility


@torch.inference_mode()
def _read(model: CachedModel, problem: ProblemLabels, encodings: Sequence[str]) -> _Forward:
    """Run one forward over the response and the tried tokens."""
    mismatches = problem.labelled()
    tree = ResponseTree(problem.response_ids)
    for mismatch in mismatches:
        if "draft" in encodings:
            tree.add(mismatch.position, mismatch.draft_id)
        if "target" in encodings:
            tree.add(mismatch.position, mismatch.target_id)
    logits, hidden = tree.read(model, problem.prompt_ids)
    previous = [mismatch.position for mismatch in mismatches]  # row 0 is the prompt's last token
    rows = {
        "draft": lambda: [tree.row(mismatch.position, mismatch.draft_id) for mismatch in mismatches],
        "target": lambda: [tree.row(mismatch.position, mismatch.target_id) for mismatch in mismatches],
        "previous": lambda: previous,
    }
    states = {
        encoding: {layer: values[rows[encoding]()].float().cpu() for layer, values in (hidden or {}).items()}
        for encoding in encodings
    }
    token_ids = torch.tensor([mismatch.draft_id for mismatch in mismatches], device=logits.device)
    entropy, probability = distribution_scalars(logits[previous], token_ids)
    return _Forward(states, entropy.cpu(), probability.cpu())


def _join(parts: Sequence[Mapping[str, HiddenStates]]) -> dict[str, HiddenStates]:
    if not parts:
        return {}
    return {
        encoding: {layer: torch.cat([part[encoding][layer] for part in parts]) for layer in parts[0][encoding]}
        for encoding in parts[0]
    }
