"""Rounds of a rule with the labels' own knowledge."""

from __future__ import annotations

import pytest

from judge_ceiling import num_rounds
from reprieve.mining.records import MINED, Mismatch, ProblemLabels


def labels(length, **important):
    mismatches = tuple(Mismatch(int(place[1:]), 1, 2, value) for place, value in important.items())
    return ProblemLabels("p", MINED, (1,), (3,) * length, (3,) * length, "7", mismatches)


@pytest.mark.parametrize(
    ("length", "important", "k", "rounds"),
    [
        (10, {}, 4, 2),  # 4 + 1, 4 + 1
        (11, {}, 4, 3),
        (10, {"p2": True}, 4, 3),  # 3 (the target's token at 2), 4 + 1, 2
        (10, {"p0": True, "p1": True}, 4, 4),  # 1, 1, 4 + 1, 3
        (10, {"p2": False}, 4, 2),  # accepted inside a block
        (10, {"p4": False}, 4, 3),  # the next block starts there: 4, 4 + 1, 1
        (10, {"p4": True}, 4, 2),  # the target's own token follows the whole block
        (10, {"p2": None}, 4, 3),  # an undecided mismatch is rejected
    ],
)
def test_rounds_end_at_important_mismatches(length, important, k, rounds):
    assert num_rounds(labels(length, **important), k) == rounds
