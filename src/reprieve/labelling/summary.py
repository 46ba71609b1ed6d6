"""What a label store holds, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reprieve.labelling.records import NO_ANSWER, ProblemLabels
from reprieve.metrics import wilson_interval


@dataclass(frozen=True)
class LabelSummary:
    """Counts over a store's problems."""

    num_problems: int
    num_without_answer: int
    num_labelled: int
    num_important: int
    num_unlabelled: int
    seconds: float  # summed over problems; they overlap when several are in flight
    num_generated: int

    @property
    def share_important(self) -> float | None:
        return self.num_important / self.num_labelled if self.num_labelled else None

    def sentence(self) -> str:
        """One line for a terminal."""
        if not self.num_labelled:
            return f"{self.num_problems} problems, {self.num_without_answer} without an answer; no labelled mismatches"
        low, high = wilson_interval(self.num_important, self.num_labelled)
        return (
            f"{self.num_problems} problems ({self.num_without_answer} without an answer), {self.num_labelled} labelled "
            f"mismatches, {self.num_important} important: {100 * self.num_important / self.num_labelled:.1f}% "
            f"[{100 * low:.1f}, {100 * high:.1f}]; {self.num_unlabelled} could not be labelled"
        )


def summarise(problems: Sequence[ProblemLabels]) -> LabelSummary:
    """Counts of problems and labels."""
    labels = Counter(mismatch.important for problem in problems for mismatch in problem.mismatches)
    return LabelSummary(
        num_problems=len(problems),
        num_without_answer=sum(problem.status == NO_ANSWER for problem in problems),
        num_labelled=labels[True] + labels[False],
        num_important=labels[True],
        num_unlabelled=labels[None],
        seconds=sum(problem.seconds for problem in problems),
        num_generated=sum(problem.num_generated for problem in problems),
    )
