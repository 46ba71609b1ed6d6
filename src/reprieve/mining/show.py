"""Labels for people: counts, and problems token by token in the terminal, after AutoJudge's Figure 2."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from reprieve.mining.store import NO_ANSWER, Mismatch, ProblemLabels
from reprieve.stats import wilson_interval

_STYLES = {True: "bold red", False: "green", None: "yellow"}
_CONTINUATION = 60  # maximum number of characters shown


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


def summarise_labels(problems: Sequence[ProblemLabels], max_new_tokens: int | None = None) -> LabelSummary:
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


def shares_by_class(problems: Sequence[ProblemLabels], tokenizer: Any) -> list[tuple[str, int, int]]:
    """Return, by class of the target's token, the number of labelled and important ones; most frequent class first."""
    labelled: Counter[str] = Counter()
    important: Counter[str] = Counter()
    for problem in problems:
        for mismatch in problem.labelled():
            name = token_class(tokenizer.decode([mismatch.target_id]))
            labelled[name] += 1
            important[name] += bool(mismatch.important)
    return [(name, count, important[name]) for name, count in labelled.most_common()]


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


def terminal_text(problem: ProblemLabels, tokenizer: Any) -> Text:
    """Return text with important tokens red, unimportant ones green, the other token in brackets, then all outcomes."""
    shown, swaps = Text(), Text()
    shown.append(f"{problem.problem_id} ({problem.status})\n", style="bold")
    shown.append(tokenizer.decode(list(problem.prompt_ids)), style="dim")
    by_position = {mismatch.position: mismatch for mismatch in problem.mismatches}
    before = ""
    for position, token_id in enumerate(problem.response_ids):
        upto = tokenizer.decode(problem.response_ids[: position + 1])  # a character can span several tokens
        text, before = upto[len(before) :], upto
        mismatch = by_position.get(position)
        if mismatch is None:
            shown.append(text)
            continue
        other = tokenizer.decode([mismatch.target_id if token_id == mismatch.draft_id else mismatch.draft_id])
        shown.append(text, style=_STYLES[mismatch.important])
        shown.append(f"[{other.strip() or repr(other)}]", style="dim")
        swaps.append(f"\n{position:>4} ", style="dim")
        swaps.append_text(_swap_line(mismatch, tokenizer))
    return shown + Text("\n") + swaps


def _swap_line(mismatch: Mismatch, tokenizer: Any) -> Text:
    """Return a line with the target's token, the draft's token, the target's continuation and the outcome."""
    target_text, draft_text = (
        tokenizer.decode([token_id]).strip() for token_id in (mismatch.target_id, mismatch.draft_id)
    )
    continuation = " ".join(tokenizer.decode(list(mismatch.continuation_ids), skip_special_tokens=True).split())
    if len(continuation) > _CONTINUATION:
        continuation = continuation[: _CONTINUATION // 2] + " ... " + continuation[-_CONTINUATION // 2 :]
    style = _STYLES[mismatch.important]
    return Text.assemble(
        (f"{target_text!r} -> {draft_text!r} ", style), (f"...{continuation} ", "dim"), (_outcome(mismatch), style)
    )


def _outcome(mismatch: Mismatch) -> str:
    """Return the outcome of trying the token, in a word or two."""
    mark = {True: "✗", False: "✓", None: "?"}[mismatch.important]
    if mismatch.base_utility is not None:
        mark += f" {mismatch.candidate_utility:.2f} of {mismatch.base_utility:.2f}"
    elif mismatch.answer is not None:
        mark += f" {mismatch.answer[:40]}"
    return f"{mark} ({mismatch.reason})" if mismatch.reason else mark
