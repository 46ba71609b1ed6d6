"""A small run of the fuzzing that `benchmarks/fuzz.py` does at length."""

import pytest

from benchmarks.fuzz import fuzz


@pytest.mark.parametrize("what", ["journals", "bodies", "yaml", "answers"])
def test_malformed_input_raises_our_errors_only(tmp_path, what):
    assert fuzz(what, 25, 7, tmp_path) >= 25
