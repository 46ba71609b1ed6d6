"""Labelled tokens: features from one parallel forward per problem and model, splits by problem, and metrics.

Verification computes states in parallel, so heads are trained on parallel states (AutoJudge, appendix C). The final
response is a chain; tokens that were tried but not kept are leaves of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from reprieve.engine import Pair
from reprieve.errors import SpecError, require_range
from reprieve.heads.features import TokenStates, assemble, distribution_scalars
from reprieve.heads.settings import FeatureRecipe
from reprieve.mining.store import Mismatch, ProblemLabels
from reprieve.models.cached_model import CachedModel, HiddenLayers, ResponseTree
from reprieve.stats import bootstrap_interval
from reprieve.types import HiddenStates, Progress, no_progress

RECALL = 0.9  # minimum share of important tokens that AutoJudge's thresholds catch


@dataclass(frozen=True)
class LabelledTokens:
    """All labelled mismatches of a store, with the values that verification would have."""

    states: TokenStates
    important: np.ndarray  # [n], bool
    problem_ids: np.ndarray  # [n], str
    gains: np.ndarray  # [n], utility of the draft's side minus the target's; NaN without utilities

    def features(self, recipe: FeatureRecipe) -> np.ndarray:
        """Return features [n, F], float32."""
        return assemble(recipe, self.states).numpy()


_Reading = tuple[Mapping[str, HiddenStates], Tensor, Tensor]  # states by encoding; entropy and probability, [n]


def _join(parts: Sequence[_Reading]) -> _Reading:
    """Concatenate the readings of several problems."""
    hidden, entropy, probability = zip(*parts, strict=True)
    states = {
        encoding: {layer: torch.cat([one[encoding][layer] for one in hidden]) for layer in of}
        for encoding, of in hidden[0].items()
    }
    return states, torch.cat(entropy), torch.cat(probability)


def collect(
    pair: Pair,
    problems: Sequence[ProblemLabels],
    *,
    layers: HiddenLayers = (-1,),
    draft_layers: HiddenLayers = (-1,),
    encodings: Sequence[str] = ("draft", "target", "previous"),
    progress: Progress = no_progress,
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
    target_parts: list[_Reading] = []
    draft_parts: list[_Reading] = []
    for number, problem in enumerate(problems):
        if problem.labelled():
            target_parts.append(_read(target, problem, encodings))
            if draft is not None:
                draft_parts.append(_read(draft, problem, encodings))
        progress(number + 1, len(problems))
    labelled = [(problem.problem_id, mismatch) for problem in problems for mismatch in problem.labelled()]
    if not labelled:
        raise SpecError("labels must hold at least one labelled mismatch, got none")
    hidden, entropy, probability = _join(target_parts)
    no_draft: tuple[Any, Any, Any] = ({}, None, None)
    draft_hidden, draft_entropy, draft_probability = _join(draft_parts) if draft_parts else no_draft
    states = TokenStates(hidden, draft_hidden, entropy, probability, draft_entropy, draft_probability)
    return LabelledTokens(
        states=states,
        important=np.array([bool(mismatch.important) for _, mismatch in labelled]),
        problem_ids=np.array([problem_id for problem_id, _ in labelled]),
        gains=np.array([_gain(mismatch) for _, mismatch in labelled]),
    )


def _gain(mismatch: Mismatch) -> float:
    if mismatch.base_utility is None or mismatch.candidate_utility is None:
        return float("nan")
    return mismatch.candidate_utility - mismatch.base_utility


@torch.inference_mode()
def _read(model: CachedModel, problem: ProblemLabels, encodings: Sequence[str]) -> _Reading:
    """Run one forward over the response and the tried tokens."""
    mismatches = problem.labelled()
    positions = [mismatch.position for mismatch in mismatches]  # row 0 is the prompt's last token
    tried = {
        "draft": [mismatch.draft_id for mismatch in mismatches],
        "target": [mismatch.target_id for mismatch in mismatches],
    }
    nodes = {name: list(zip(positions, ids, strict=True)) for name, ids in tried.items() if name in encodings}
    tree = ResponseTree(problem.response_ids)
    for of_mismatch in zip(*nodes.values(), strict=True):
        for node in of_mismatch:
            tree.add(*node)
    logits, hidden = tree.read(model, problem.prompt_ids)
    rows = {"previous": positions, **{name: [tree.row(*node) for node in of] for name, of in nodes.items()}}
    states = {
        encoding: {layer: values[rows[encoding]].float().cpu() for layer, values in (hidden or {}).items()}
        for encoding in encodings
    }
    token_ids = torch.tensor(tried["draft"], device=logits.device)
    entropy, probability = distribution_scalars(logits[positions], token_ids)
    return states, entropy.cpu(), probability.cpu()


def split_by_problem(
    problem_ids: np.ndarray,  # [n], of each token
    important: np.ndarray,  # [n], bool
    *,
    held_out: float,
    seed: int,
) -> np.ndarray:  # [n], bool: held out
    """Hold out whole problems, because the tokens of one text are too similar to be split.

    Raises:
        SpecError: a share outside (0, 0.9], fewer than two problems, or a side with labels of one kind only.
    """
    require_range("held_out", held_out, 0.0, 0.9, low_open=True)
    problems = np.unique(problem_ids)
    if len(problems) < 2:
        raise SpecError(f"labels must come from at least 2 problems to hold some out, got {len(problems)}")
    order = np.random.default_rng(seed).permutation(len(problems))
    num_held = min(max(1, round(held_out * len(problems))), len(problems) - 1)
    held = np.isin(problem_ids, problems[order[:num_held]])
    for side, name in ((~held, "training"), (held, "held-out")):
        if len(np.unique(important[side])) < 2:
            raise SpecError(
                f"the {name} problems must hold important and unimportant tokens, got {int(important[side].sum())} "
                f"important of {int(side.sum())}; mine more problems"
            )
    return held


def folds_by_problem(
    problem_ids: np.ndarray,  # [n], of each token
    labels: np.ndarray,  # [n], bool
    *,
    num_folds: int,
    seed: int,
) -> np.ndarray:  # [n], the fold of each token, from 0
    """Assign whole problems to folds, spreading those with labelled tokens evenly; no more folds than such problems.

    Raises:
        SpecError: fewer than two problems with labelled tokens, or with other tokens, or all other tokens in one fold.
    """
    labelled = np.unique(problem_ids[labels])
    for side, name in ((labelled, "labelled"), (np.unique(problem_ids[~labels]), "other")):
        if len(side) < 2:
            raise SpecError(f"at least 2 problems must hold {name} tokens, got {len(side)}; mine more problems")
    others = np.setdiff1d(problem_ids, labelled)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(labelled), rng.permutation(others)])
    fold_of = {problem: index % min(num_folds, len(labelled)) for index, problem in enumerate(order)}
    folds = np.array([fold_of[problem_id] for problem_id in problem_ids])
    if len(np.unique(folds[~labels])) < 2:
        num = len(np.unique(problem_ids[~labels]))
        raise SpecError(f"all other tokens, of {num} problems, fell into one fold; mine more, or change --seed")
    return folds


def auc(important: np.ndarray, scores: np.ndarray) -> float:
    """Return the ROC AUC; NaN if only one label occurs."""
    return float(roc_auc_score(important, scores)) if 0 < important.sum() < len(important) else float("nan")


def auc_interval(important: np.ndarray, scores: np.ndarray, problem_ids: np.ndarray, *, seed: int = 0) -> list[float]:
    """Return the AUC with a 95% bootstrap interval over problems: [auc, low, high]."""
    problems = np.unique(problem_ids)
    rows = [np.flatnonzero(problem_ids == problem) for problem in problems]

    def resampled(index: np.ndarray) -> float:
        chosen = np.concatenate([rows[i] for i in index])
        return auc(important[chosen], scores[chosen])

    low, high = bootstrap_interval(resampled, len(problems), seed=seed, num_resamples=1000)
    known = np.isfinite(low) and np.isfinite(high)  # with few problems, most resamples have only one kind of label
    return [auc(important, scores), low if known else 0.0, high if known else 1.0]


def threshold_at_recall(important: np.ndarray, scores: np.ndarray, recall: float) -> float:
    """Return the largest threshold that still refuses `recall` of the important tokens (risk above it is refused)."""
    risks = np.sort(scores[important])
    num_missed = len(risks) - int(np.ceil(recall * len(risks) - 1e-9))
    below = float(risks[num_missed])
    rounded = float(f"{below:.3g}")  # easy to type
    return rounded if rounded < below else float(f"{below * 0.995:.3g}")


def summarise_held_out(
    tokens: LabelledTokens,
    held: np.ndarray,  # [n], bool
    scores: np.ndarray,  # [number held out], of the held-out tokens
    *,
    held_out: float,
    seed: int,
) -> tuple[float, dict[str, Any]]:
    """Return the recommended threshold, which refuses 90% of the held-out important tokens, and the card's facts."""
    important = tokens.important[held]
    threshold = threshold_at_recall(important, scores, RECALL)
    return threshold, {
        "num_problems": len(np.unique(tokens.problem_ids)),
        "num_tokens": len(tokens.important),
        "num_important": int(tokens.important.sum()),
        "held_out": held_out,
        "seed": seed,
        "auc_held_out": auc_interval(important, scores, tokens.problem_ids[held]),
        "recall_at_threshold": RECALL,
        "acceptance_at_threshold": float((scores[~important] <= threshold).mean()),
    }
