"""Rounds of a rule with the labels' own knowledge."""

from __future__ import annotations

import pytest

from judge_ceiling import CEILING, SEARCH, ceiling, num_rounds
from reprieve.bench.arms import make_arms
from reprieve.bench.records import read_answers, read_run
from reprieve.errors import SpecError
from reprieve.mining.store import MINED, LabelStore, Mismatch, ProblemLabels
from tests.bench.toys import run
from tests.mining.toys import MANIFEST


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


def test_the_table_compares_the_labels_with_a_run_of_the_same_problems(pair, tmp_path):
    run(pair, make_arms(["margin:delta=1"], [4]), tmp_path / "run")
    config = read_run(tmp_path / "run")
    names = sorted({record.problem_id for record in read_answers(tmp_path / "run")})
    manifest = {**MANIFEST, **{name: config[name] for name in ("target", "draft", "task", "split")}}
    store = LabelStore(tmp_path / "labels", manifest)
    for name in names[:4]:
        store.append(ProblemLabels(name, MINED, (1,), (3,) * 10, (3,) * 10, "7", (), source=SEARCH))
    store.append(ProblemLabels(names[4], MINED, (1,), (3,) * 10, (3,) * 10, "7", (), source="autojudge-naive"))
    table = ceiling(tmp_path / "labels", tmp_path / "run")
    assert [line[0] for line in table["rows"]] == ["`lossless`", "`margin:delta=1`", CEILING]
    assert table["rows"][0][3] == "1.00 [1.00, 1.00]" and table["rows"][-1][2] == "5.00"
    assert table["note"].startswith("n = 4 ")
    LabelStore(tmp_path / "others", {**manifest, "split": "dev"})
    with pytest.raises(SpecError, match=r"labels must have the run's split, .* got 'dev'"):
        ceiling(tmp_path / "others", tmp_path / "run")
    run(pair, make_arms(["margin:delta=1"], [4, 8]), tmp_path / "two")
    with pytest.raises(SpecError, match="must be a run at one K"):
        ceiling(tmp_path / "labels", tmp_path / "two")
