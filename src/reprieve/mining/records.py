"""What miners find out about one problem, and its form in Parquet."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

MINED = "mined"
NO_ANSWER = "no_answer"  # the target's own response gives no answer: there is nothing to compare with


@dataclass(frozen=True)
class Mismatch:
    """One drafted token the target would not have put there, and what was found out about it.

    The text before it is the prompt and the first `position` tokens of the problem's final response, for every
    miner: each decides the tokens of that response in turn.
    """

    position: int  # in the response
    target_id: int
    draft_id: int
    important: bool | None  # AutoJudge's "important", PAD's "pivot"; None where it could not be decided
    reason: str = ""  # where `important` is not the plain outcome: why
    continuation_ids: tuple[int, ...] = ()  # what followed the draft token when it was tried
    answer: str | None = None  # which that response gives
    base_utility: float | None = None  # PAD: share of correct rollouts from the text before the token
    candidate_utility: float | None = None  # PAD: and from the text with it
    num_rollouts: int = 0  # PAD: on each side
    verdict: str = ""  # of a language model, where one was asked


@dataclass(frozen=True)
class TracedRound:
    """One round of plain speculative decoding, and what each mismatch in its block is worth (CoSpec, appendix C.1).

    All lists have a place for each drafted token; None where it is the target's own, or was not asked about.
    """

    start: int  # tokens of the response before it
    draft_ids: tuple[int, ...]
    target_ids: tuple[int, ...]  # the target's own token in the place of each
    labels: tuple[float | None, ...]  # soft label for accepting the draft's token, 0 to 1
    draft_utilities: tuple[float | None, ...] = ()  # of going on with the draft's token
    target_utilities: tuple[float | None, ...] = ()

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> TracedRound:
        """From Parquet."""
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in row.items()}
        return cls(**values)


@dataclass(frozen=True)
class ProblemLabels:
    """All mismatches of one problem, in order, and the response they leave."""

    problem_id: str
    status: str  # "mined" or "no_answer"
    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]  # the target's own response
    response_ids: tuple[int, ...]  # with every unimportant token replaced by the draft's
    target_answer: str | None
    mismatches: tuple[Mismatch, ...]
    seconds: float = 0.0
    num_generated: int = 0  # tokens the target generated for it
    source: str = field(default="")  # the miner's name
    rounds: tuple[TracedRound, ...] = ()  # of the response, where the miner keeps them
    digest: str = ""  # of the problem's question; empty in stores made before version 1.0

    def labelled(self) -> list[Mismatch]:
        """The mismatches that got a label."""
        return [mismatch for mismatch in self.mismatches if mismatch.important is not None]

    def to_row(self) -> dict[str, Any]:
        """As Parquet holds it."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> ProblemLabels:
        """The inverse of `to_row`; columns of later versions are passed over."""
        values = {f.name: row[f.name] for f in fields(cls) if f.name in row}
        for name in ("prompt_ids", "target_ids", "response_ids"):
            values[name] = tuple(values[name])
        values["mismatches"] = tuple(
            Mismatch(**{**mismatch, "continuation_ids": tuple(mismatch["continuation_ids"])})
            for mismatch in values["mismatches"]
        )
        values["digest"] = values.get("digest") or ""
        values["rounds"] = tuple(map(TracedRound.from_row, values.get("rounds") or ()))
        return cls(**values)
