"""Health checks of a server: one question to the workers at a time, without a timeout in vLLM's executor."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

from reprieve.vllm_plugin import startup

WELL, FAILED = ({"active": True, "rank": 0, "failures": number} for number in (0, 1))


class DeadError(Exception):
    """Stands in for vLLM's."""


class Engine:
    """An engine whose workers answer when they are let."""

    def __init__(self, status=WELL):
        self.vllm_config = SimpleNamespace(additional_config={"reprieve": "margin"})
        self.status, self.asked, self.free = status, 0, asyncio.Event()

    async def collective_rpc(self, method):
        assert method == "reprieve_status"
        self.asked += 1
        await self.free.wait()
        return [self.status]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    module = ModuleType("vllm.v1.engine.exceptions")
    module.EngineDeadError = DeadError
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(startup, "_menu", lambda config: object())
    monkeypatch.setattr(startup, "_PATIENCE_S", 0.05)


def test_a_slow_step_is_no_failure_and_is_asked_about_once():
    async def probe():
        engine = Engine()
        await asyncio.gather(*(startup._require_healthy(engine) for _ in range(3)))
        await startup._require_healthy(engine)
        assert engine.asked == 1, "the question is still open"
        engine.free.set()
        await startup._require_healthy(engine)
        await startup._require_healthy(engine)
        assert engine.asked == 1, "the answer is fresh"

    asyncio.run(probe())


def test_a_status_is_asked_for_again_when_it_is_old(monkeypatch):
    async def probe():
        engine = Engine()
        engine.free.set()
        await startup._require_healthy(engine)
        monkeypatch.setattr(startup, "_FRESH_S", 0.0)
        engine.status = FAILED
        with pytest.raises(DeadError):
            await startup._require_healthy(engine)
        assert engine.asked == 2
        engine.free.clear()
        with pytest.raises(DeadError):  # also while a step is slow: a failed rule stays failed until a restart
            await startup._require_healthy(engine)

    asyncio.run(probe())


def test_workers_that_never_answer_are_a_failure(monkeypatch):
    async def probe():
        engine = Engine()
        await startup._require_healthy(engine)
        monkeypatch.setattr(startup, "_STUCK_S", 0.0)
        with pytest.raises(DeadError):
            await startup._require_healthy(engine)

    asyncio.run(probe())
