"""A tiny pair shared by the tests in this folder."""

import pytest

from reprieve.engine import Pair
from tests.kit.tiny import NumberTokenizer, perturbed, tiny_model


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return Pair(target, perturbed(target), NumberTokenizer(), "toy-target", "toy-draft")
