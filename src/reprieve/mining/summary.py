"""Statistics of a label store."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.mining.records import NO_ANSWER, ProblemLabels
from reprieve.stats import wilson_interval


@dataclass(frozen=True)
class LabelSummary:
    """Counts over a store's problems."""

    num_problems: int
    num_without_answer: int
    num_labelled: int
    num_important: int
    num_unlabelled: int
    num_generated: int
    num_cut_off: int = 0  # responses of the largest length

    def sentence(self) -> str:
        """Return a one-line summary for a terminal."""
        if not self.num_labelled:
            return f"{self.num_problems} problems, {self.num_without_answer} without an answer; no labelled mismatches"
        low, high = wilson_interval(self.num_important, self.num_labelled)
        return (
            f"{self.num_problems} problems ({self.num_without_answer} without an answer), {self.num_labelled} labelled "
            f"mismatches, {self.num_important} important: {100 * self.num_important / self.num_labelled:.1f}% "
            f"[{100 * low:.1f}, {100 * high:.1f}]; {self.num_unlabelled} could not be labelled"
        )


def summarise(problems: Sequence[ProblemLabels], max_new_tokens: int | None = None) -> LabelSummary:
    """Count problems and labels.

    Args:
        max_new_tokens: maximum length of a response, to count truncated ones; None if unknown.
    """
    lengths = [len(problem.target_ids or problem.response_ids) for problem in problems]
    labels = Counter(mismatch.important for problem in problems for mismatch in problem.mismatches)
    return LabelSummary(
        num_problems=len(problems),
        num_without_answer=sum(problem.status == NO_ANSWER for problem in problems),
        num_labelled=labels[True] + labels[False],
        num_important=labels[True],
        num_unlabelled=labels[None],
        num_generated=sum(problem.num_generated for problem in problems),
        num_cut_off=sum(length >= max_new_tokens for length in lengths) if max_new_tokens else 0,
    )


_CLASSES = (
    ("end of text", re.compile(r"<[|/]?\w+[|]?>")),
    ("number", re.compile(r"\s*[-+]?\d[\d.,]*\s*")),
    ("operator", re.compile(r"\s*[+\-*/=<>^%×÷]+\s*")),
    ("punctuation", re.compile(r"\s*[^\w\s]+\s*")),
    ("space", re.compile(r"\s*")),
    ("word", re.compile(r"\s*[^\W\d_]+\s*")),
)


def token_class(text: str) -> str:
    """Return the class of a token's text: number, operator, word, punctuation, space, end of text, or other."""
    return next((name for name, pattern in _CLASSES if pattern.fullmatch(text)), "other")


@dataclass(frozen=True)
class ClassShare:
    """Labels of one class of target tokens."""

    name: str
    num_labelled: int
    num_important: int


def shares_by_class(problems: Sequence[ProblemLabels], tokenizer: Any) -> list[ClassShare]:
    """Return labels by the class of the target's token, most frequent first."""
    labelled: Counter[str] = Counter()
    important: Counter[str] = Counter()
    for problem in problems:
        for mismatch in problem.labelled():
            name = token_class(tokenizer.decode([mismatch.target_id]))
            labelled[name] += 1
            important[name] += bool(mismatch.important)
    return [ClassShare(name, count, important[name]) for name, count in labelled.most_common()]


def frequent_important(problems: Sequence[ProblemLabels], tokenizer: Any, limit: int) -> list[tuple[str, str, int]]:
    """Return the most frequent important swaps: target's token, draft's token, count."""
    swaps = Counter(
        (mismatch.target_id, mismatch.draft_id)
        for problem in problems
        for mismatch in problem.labelled()
        if mismatch.important
    )
    return [
        (tokenizer.decode([target_id]), tokenizer.decode([draft_id]), count)
        for (target_id, draft_id), count in swaps.most_common(limit)
    ]
