"""Tensor-parallel ranks on the V2 runner, in separate processes, decide alike, also with random rules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.runner import V2

pytestmark = pytest.mark.skipif(not V2, reason="of the V2 runner: RUNNER=v2")


def answers(num_ranks):
    made = subprocess.run(
        [sys.executable, "-m", "tests.vllm.ranks", str(num_ranks)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    line = next((line for line in made.stdout.splitlines() if line.startswith("MADE ")), None)
    assert line is not None, made.stderr[-3000:]
    return json.loads(line.removeprefix("MADE "))


def test_two_ranks_give_the_same_answers_as_one():
    one, two = answers(1), answers(2)
    assert one["answers"] == two["answers"]
    assert one["failures"] == [0] and two["failures"] == [0, 0]
    assert sum(num_rescued for _, num_rescued in two["answers"]) > 0
