"""Helpers shared by the tests of mining."""

from __future__ import annotations

import dataclasses

from reprieve.mining.store import MINED, Mismatch, ProblemLabels
from tests.kit.tiny import IDENTITY

MANIFEST = {"miner": "autojudge", "task": "words", **dataclasses.asdict(IDENTITY)}
SHORT = 69  # a training problem with a short answer, whose mismatches are of both kinds


def labels(problem_id="p-1", important=True) -> ProblemLabels:
    mismatch = Mismatch(1, 5, 6, important, continuation_ids=(9, 6, 0), answer="6")
    return ProblemLabels(problem_id, MINED, (40,), (1, 5, 9, 5, 0), (1, 5, 9, 5, 0), "5", (mismatch,))


class FakeChat:
    """Return the given replies in turn."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.prompts = []

    async def ask(self, prompt, *, attempt=0):
        self.prompts.append(prompt)
        return self.replies.pop(0)
