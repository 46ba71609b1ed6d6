"""Endings of mismatches, by position."""

from mismatches import Ending, endings, row
from reprieve.mining.store import MINED, ProblemLabels, TracedRound


def test_both_sides_of_each_graded_mismatch_are_compared():
    first = TracedRound(0, (5, 6), (7, 8), (0.0, None), (0.0, None), (1.0, None))
    second = TracedRound(3, (5, 6, 7), (5, 9, 9), (None, 0.8, 1.0), (None, 1.0, 1.0), (None, 1.0, 0.0))
    problem = ProblemLabels("p", MINED, (1,), (), (7, 1, 2, 5, 6), None, (), rounds=(first, second))
    found = list(endings([problem]))
    assert found == [Ending("p", 0, -1.0), Ending("p", 4, 0.0), Ending("p", 5, 1.0)]
    name, count, *shares = row("all", found)
    assert (name, count) == ("all", "3") and all(share.startswith("33.3 [") for share in shares)
