"""Many problems in flight: failures are reported and retried."""

from __future__ import annotations

import asyncio

import pytest

from reprieve.concurrency import gather_all
from reprieve.engine.continuations import ContinuationDecoder, Session
from reprieve.errors import ReprieveError, SpecError
from reprieve.mining.runner import mine_problems
from reprieve.mining.store import LabelStore
from reprieve.mining.target import LocalTarget
from reprieve.models.sampling import UniformDraw
from reprieve.settings import SamplingParams
from tests.kit.mining import problem
from tests.kit.tiny import tiny_model
from tests.mining.toys import MANIFEST, labels


class Flaky:
    """Fails on one problem."""

    def __init__(self):
        self.fails = {"p-1"}

    async def mine(self, item):
        if item.problem_id in self.fails:
            raise RuntimeError("server is away")
        return labels(item.problem_id)


def test_failed_problems_are_reported_and_retried_without_labels(tmp_path, capsys):
    store, flaky = LabelStore(tmp_path, MANIFEST), Flaky()
    problems = [problem(f"p-{n}") for n in range(3)]
    report = mine_problems(flaky, problems, store, num_in_flight=2)
    assert (report.num_mined, report.errors) == (2, {"p-1": "RuntimeError: server is away"})
    assert "p-1: RuntimeError" in capsys.readouterr().err
    flaky.fails = set()
    report = mine_problems(flaky, problems, store)
    assert (report.num_mined, report.num_skipped) == (1, 2)
    flaky.fails = {"p-7"}
    report = mine_problems(flaky, [problem("p-0"), problem("p-7")], store)
    report.require_some()  # one problem was labelled before
    with pytest.raises(ReprieveError, match="every problem failed; the first, p-7: RuntimeError"):
        mine_problems(flaky, [problem("p-7")], store).require_some()
    with pytest.raises(SpecError, match="num_in_flight must be 1 or more, got 0"):
        mine_problems(flaky, problems, store, num_in_flight=0)


def test_a_failed_forward_fails_its_problems_without_hanging():
    model = tiny_model()
    params = SamplingParams(temperature=1.0)
    decoder = ContinuationDecoder(model, num_rows=2, params=params, eos_ids=frozenset())
    target = LocalTarget(decoder)

    def fail():
        raise RuntimeError("bad draw")

    async def ask():
        first = target.complete(Session(), [1, 2], [], 4, UniformDraw(fail))
        with pytest.raises(RuntimeError, match="bad draw"):
            await asyncio.wait_for(first, timeout=5)
        return await asyncio.wait_for(target.complete(Session(), [1, 2], [], 4, None), timeout=5)

    assert len(asyncio.run(ask())) == 4


def test_a_cancelled_problem_leaves_no_request_behind():
    decoder = ContinuationDecoder(tiny_model(), num_rows=1, params=SamplingParams(), eos_ids=frozenset())
    target = LocalTarget(decoder)

    async def fail():
        await asyncio.sleep(0)
        raise RuntimeError("judge is away")

    async def both():
        texts = [target.complete(Session(), [1, 2], [], 200, None) for _ in range(3)]
        with pytest.raises(RuntimeError, match="judge is away"):
            await gather_all([*texts, fail()])

    asyncio.run(both())
    assert decoder.idle


A, B, C, AB, BC, SPACE = range(1, 7)
