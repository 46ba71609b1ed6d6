"""Whether an arbiter chooses the branch that ends better, at the mismatches its own decoding reaches (CoSpec, Table 3).

At every effective decision the other branch is decoded too, with the same frozen policy: the only intervention is the
choice at that one mismatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.labelling.responses import ResponseFormat
from reprieve.metrics import BranchChoices, bootstrap_interval
from reprieve.models import Pair
from reprieve.models.cached_model import eos_token_ids
from reprieve.tasks.base import Task, TaskProblem
from reprieve.types import Generation, RoundTrace

CATEGORIES = ("all", "draft_better", "target_better", "both_right", "both_wrong")
_SHARES = {
    "draft_not_worse": "num_draft_not_worse",
    "draft_chosen": "num_draft_chosen",
    "agreement": "num_agreed",
}


@dataclass(frozen=True)
class Diagnosis:
    """The choices of an arbiter at reached mismatches, problem by problem."""

    num_correct: int
    choices: Sequence[BranchChoices]  # of each problem

    def summary(self) -> dict[str, Any]:
        """Table 3: for each category its share of the mismatches and, within it, how often the draft's branch was not
        worse, was chosen, and the choice was not worse than the other; with 95% bootstrap intervals over problems."""
        counts = [choices.counts() for choices in self.choices]
        totals = np.array([count["all"]["num"] for count in counts])
        found: dict[str, Any] = {
            "num_problems": len(counts),
            "num_correct": self.num_correct,
            "num_mismatches": int(totals.sum()),
        }
        for category in CATEGORIES:
            nums = np.array([count[category]["num"] for count in counts])
            shares = {"share": _ratio(nums, totals)}
            for name, key in _SHARES.items():
                shares[name] = _ratio(np.array([count[category][key] for count in counts]), nums)
            found[category] = {"num": int(nums.sum()), **shares}
        return found


def _ratio(parts: np.ndarray, wholes: np.ndarray) -> list[float] | None:
    """A share with its interval over problems; None of nothing."""
    if not wholes.sum():
        return None

    def share(places: np.ndarray) -> float:
        whole = wholes[places].sum()
        return float(parts[places].sum() / whole) if whole else float("nan")

    return [float(parts.sum() / wholes.sum()), *bootstrap_interval(share, len(parts))]


def diagnose(
    decoder: SpeculativeDecoder,
    pair: Pair,
    task: Task,
    problems: Sequence[TaskProblem],
    params: SamplingParams,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Decode problems greedily and, at every decision on the way, the branch that was not taken.

    Args:
        decoder: with a rule that asks an arbiter and decides by its threshold.

    Raises:
        SpecError: sampling: one branch alone would then not tell what its choice is worth.
    """
    if not params.greedy:
        raise SpecError(f"temperature must be 0 to follow both branches, got {params.temperature!r}")
    responses = ResponseFormat(
        pair.tokenizer, task, eos_token_ids(pair.target, pair.tokenizer), max_new_tokens=params.max_new_tokens
    )
    found, num_correct = [], 0
    for number, problem in enumerate(problems):
        branches = _Branches(decoder, responses, problem, params)
        found.append(branches.choices())
        num_correct += branches.correct
        progress(number + 1, len(problems))
    return Diagnosis(num_correct, found)


class _Branches:
    """One problem's answer and the answers it could have had."""

    def __init__(
        self, decoder: SpeculativeDecoder, responses: ResponseFormat, problem: TaskProblem, params: SamplingParams
    ) -> None:
        self.decoder = decoder
        self.responses = responses
        self.problem = problem
        self.params = params
        self.made = decoder.generate(problem.prompt, params, trace=True)
        self.correct = self._is_correct(self.made.token_ids)

    def choices(self) -> BranchChoices:
        accepted, ours, theirs = [], [], []
        for start, traced, place in _decisions(self.made):
            took_draft = place < len(traced.path)
            other = float(self._is_correct(self._other_branch(start, traced, place)))
            accepted.append(took_draft)
            ours.append(float(self.correct) if took_draft else other)
            theirs.append(other if took_draft else float(self.correct))
        return BranchChoices(accepted, ours, theirs)

    def _other_branch(self, start: int, traced: RoundTrace, place: int) -> list[int]:
        """The whole response had the decision at a place of the round gone the other way."""
        text = [*self.made.token_ids[:start], *traced.drafted_ids[:place]]
        if place < len(traced.path):
            return self._continued([*text, traced.target_ids[place]])
        return self._continued([*text, traced.drafted_ids[place], *self._scan_on(traced, place + 1)])

    def _scan_on(self, traced: RoundTrace, first: int) -> list[int]:
        """What the rest of a block commits from a place on, by the decisions that were made on it."""
        assert traced.risks is not None and traced.bonus_id is not None
        limit = self.decoder.rule.threshold
        for place in range(first, len(traced.drafted_ids)):
            if not traced.lossless_accepts[place] and traced.risks[place] > limit:
                return [*traced.drafted_ids[first:place], traced.target_ids[place]]
        return [*traced.drafted_ids[first:], traced.bonus_id]

    def _continued(self, response_ids: list[int]) -> list[int]:
        """The response decoded to its end; cut where it has ended already."""
        if (end := self.responses.length_of(response_ids)) is not None:
            return response_ids[:end]
        left = self.params.max_new_tokens - len(response_ids)
        made = self.decoder.generate(
            [*self.made.prompt_ids, *response_ids], dataclasses.replace(self.params, max_new_tokens=left)
        )
        return [*response_ids, *made.token_ids]

    def _is_correct(self, response_ids: list[int]) -> bool:
        return self.responses.task.equivalent(self.responses.answer(response_ids), self.problem.reference)


def _decisions(made: Generation) -> list[tuple[int, RoundTrace, int]]:
    """Every effective decision: where in the response its round began, the round, and the place from 0 in its block."""
    found, start = [], 0
    assert made.trace is not None
    for traced in made.trace:
        reached = min(len(traced.committed), len(traced.path) + 1, len(traced.drafted_ids))
        for place in range(reached):
            if not traced.lossless_accepts[place]:
                found.append((start, traced, place))
        start += len(traced.committed)
    return found
