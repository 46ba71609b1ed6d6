"""Results of mining one problem."""

from __future__ import annotations

from dataclasses import dataclass

MINED = "mined"
NO_ANSWER = "no_answer"  # the target's own response has no answer to compare with


@dataclass(frozen=True)
class Mismatch:
    """Drafted token that the target would not have chosen, and its label.

    For every miner, its context is the prompt and the first `position` tokens of the problem's final response, because
    miners decide the tokens of that response in order.
    """

    position: int  # in the response
    target_id: int
    draft_id: int
    important: bool | None  # AutoJudge's "important", PAD's "pivot"; None if undecided
    reason: str = ""  # set if `important` does not follow from answers or utilities
    continuation_ids: tuple[int, ...] = ()  # continuation after the draft token
    answer: str | None = None  # answer of that response
    base_utility: float | None = None  # PAD: share of correct rollouts from the text before the token
    candidate_utility: float | None = None  # PAD: the same with the token
    num_rollouts: int = 0  # PAD: on each side
    verdict: str = ""  # of a language model, if used


@dataclass(frozen=True)
class TracedRound:
    """One round of plain speculative decoding, with the values of the mismatches in its block (CoSpec, appendix C.1).

    All lists have one entry per drafted token. Labels and utilities are None for matches and unevaluated mismatches.
    """

    start: int  # tokens of the response before it
    draft_ids: tuple[int, ...]
    target_ids: tuple[int, ...]  # the target's own token at each position
    labels: tuple[float | None, ...]  # soft label for accepting the draft's token, 0 to 1
    draft_utilities: tuple[float | None, ...] = ()  # of continuing with the draft's token
    target_utilities: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class ProblemLabels:
    """All mismatches of one problem, in order, and the final response."""

    problem_id: str
    status: str  # "mined" or "no_answer"
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]  # the target's own response; () if the miner generates none
    response_ids: tuple[int, ...]  # final; search and pivot miners keep unimportant draft tokens
    target_answer: str | None
    mismatches: tuple[Mismatch, ...]
    seconds: float = 0.0
    num_generated: int = 0  # tokens the target generated for it
    source: str = ""  # the miner's name
    rounds: tuple[TracedRound, ...] = ()  # of the response, if the miner records them
    digest: str = ""  # of the problem's question

    def labelled(self) -> list[Mismatch]:
        """Return the mismatches that have a label."""
        return [mismatch for mismatch in self.mismatches if mismatch.important is not None]
