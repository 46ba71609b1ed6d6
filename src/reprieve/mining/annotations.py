"""Manual annotations: every token of a response labelled right or wrong (Judge Decoding; AutoJudge, appendix N)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError
from reprieve.mining.store import MINED, Mismatch, ProblemLabels
from reprieve.tasks.table import read_jsonl


def read_annotations(path: Path, tokenizer: Any) -> list[ProblemLabels]:
    """Read annotated responses from a JSONL file.

    Each line has `prompt`, `response`, and `wrong`: a list of [start, end) character spans of the response. Tokens that
    touch a span are important, all others are not. The head learns from the states that encode the token itself.

    Args:
        tokenizer: a fast tokenizer, which maps tokens to character offsets.

    Raises:
        ReprieveError: a missing field, or a span outside the response; names file and line.
    """
    problems = [_problem(row, f"{path}, line {number}", number, tokenizer) for number, row in read_jsonl(path)]
    ids = [problem.problem_id for problem in problems]
    if twice := next((name for name in ids if ids.count(name) > 1), None):
        raise ReprieveError(f"{path}: id must be unique, got {twice!r} twice")
    return problems


def _problem(row: dict[str, Any], where: str, number: int, tokenizer: Any) -> ProblemLabels:
    if missing := {"prompt", "response", "wrong"} - row.keys():
        raise ReprieveError(f"{where}: must have prompt, response and wrong; {', '.join(sorted(missing))} is missing")
    prompt, response = str(row["prompt"]), str(row["response"])
    if not isinstance(row["wrong"], list):
        raise ReprieveError(f"{where}: wrong must be a list of [start, end), got {row['wrong']!r}")
    for span in row["wrong"]:
        numbers = isinstance(span, list) and len(span) == 2 and all(isinstance(end, int) for end in span)
        if not numbers or not 0 <= span[0] < span[1] <= len(response):
            raise ReprieveError(f"{where}: a span must be [start, end) in [0, {len(response)}], got {span!r}")
    prompt_ids = list(tokenizer.encode(prompt))
    encoded = tokenizer(response, add_special_tokens=False, return_offsets_mapping=True)
    mismatches = []
    for position, (token_id, (start, end)) in enumerate(
        zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ):
        wrong = any(start < span[1] and span[0] < end for span in row["wrong"])
        mismatches.append(Mismatch(position, token_id, token_id, wrong, reason="annotated"))
    return ProblemLabels(
        problem_id=str(row.get("id", f"annotated-{number}")),
        status=MINED,
        prompt_ids=tuple(prompt_ids),
        target_ids=tuple(encoded["input_ids"]),
        response_ids=tuple(encoded["input_ids"]),
        target_answer=None,
        mismatches=tuple(mismatches),
        source="annotations",
    )
