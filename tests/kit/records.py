"""A problem record to change for a test."""

from reprieve.bench.records import ProblemRecord


def a_record(**changes) -> ProblemRecord:
    values = {
        "arm": "a", "problem_id": "p", "correct": True, "answer": "7", "text": "7", "finish_reason": "eos",
        "num_tokens": 10, "num_rounds": 2, "num_drafted": 8, "num_accepted": 6, "num_rescued": 1, "seconds": 0.5,
        "seconds_by_part": {"draft": 0.1},
    }  # fmt: skip
    return ProblemRecord(**{**values, **changes})
