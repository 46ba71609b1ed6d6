"""Small models use one thread, unless more are clearly faster or requested."""

import pytest
import torch

from reprieve.engine import pair as pairs
from reprieve.errors import SpecError
from reprieve.models.cached_model import forward_seconds
from reprieve.settings import PairSettings
from tests.kit.pairs import ARITHMETIC


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("seconds_of_two", "chosen"), [(0.5, 2), (0.79, 2), (0.9, 1), (3.0, 1)])
def test_a_trial_chooses_the_number_of_threads(bundled_pair, monkeypatch, seconds_of_two, chosen):
    monkeypatch.setattr(
        pairs, "forward_seconds", lambda model, num_tokens: {1: 1.0, 2: seconds_of_two}[torch.get_num_threads()]
    )
    monkeypatch.setattr(pairs, "load_pair", lambda **asked: bundled_pair)
    torch.set_num_threads(2)
    said = []
    assert pairs.load_configured(PairSettings(ARITHMETIC.name), said.append) is bundled_pair
    assert torch.get_num_threads() == chosen
    assert bool(said) == (chosen == 1)


def test_a_requested_number_of_threads_needs_no_trial(bundled_pair, monkeypatch):
    monkeypatch.setattr(pairs, "forward_seconds", lambda model, num_tokens: pytest.fail("it was tried"))
    monkeypatch.setattr(pairs, "load_pair", lambda **asked: bundled_pair)
    said = []
    for number in (2, 1):
        pairs.load_configured(PairSettings(num_threads=number), said.append)
        assert torch.get_num_threads() == number
    torch.set_num_threads(1)
    pairs.load_configured(PairSettings(ARITHMETIC.name), said.append)  # one core: nothing to choose
    assert not said


@pytest.mark.parametrize("number", [0, -1, 1025, 1.5, True])
def test_numbers_of_threads_out_of_range_are_refused(number):
    with pytest.raises(SpecError, match="num_threads must be"):
        PairSettings(num_threads=number)


def test_the_trial_reads_the_target_and_leaves_nothing_behind(bundled_pair):
    model = bundled_pair.cached_target()
    assert forward_seconds(model, 8, num_cached=20) > 0
    assert model.length == 20
