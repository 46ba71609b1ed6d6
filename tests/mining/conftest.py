"""Labels that several files compare with."""

import dataclasses

import pytest

from tests.kit.pairs import ARITHMETIC
from tests.mining.toys import SHORT


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """Settings for one short problem, and its labels by the local engine, mined alone."""
    from reprieve.mining.building import build
    from reprieve.mining.runner import mine_problems
    from reprieve.mining.settings import AutoJudgeMining
    from reprieve.mining.store import LabelStore
    from reprieve.settings import PairSettings

    pair = PairSettings(ARITHMETIC.name, dtype="float32")
    settings = AutoJudgeMining(limit=1, offset=SHORT, task="arithmetic", pair=pair)
    bench = build(settings)
    store = LabelStore(tmp_path_factory.mktemp("short"), bench.manifest)
    mine_problems(bench.miner, bench.problems, store)
    (labels,) = store.problems()
    assert {mismatch.important for mismatch in labels.mismatches} == {True, False}
    return settings, dataclasses.replace(labels, seconds=0.0)
