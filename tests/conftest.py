"""One thread per process: the models are tiny, and threads that compete for cores cost more than they save."""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for subprocesses of tests, too
os.environ["REPRIEVE_BUNDLES"] = str(Path(__file__).parent / "fixtures")  # for subprocesses, too

import pytest
import torch

collect_ignore = [] if find_spec("vllm") else ["vllm"]  # `make test-vllm` runs these in a separate environment

torch.set_num_threads(1)

if find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in every run, so failures are reproducible; `--hypothesis-seed` tries others.
    settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
    settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def bundled_pair():
    """The fixture pair that most tests use, loaded once per worker."""
    from reprieve.engine import load_pair
    from tests.kit.pairs import ARITHMETIC

    return load_pair(ARITHMETIC.name, dtype="float32")


@pytest.fixture(scope="module")
def target():
    """A tiny random model; files that need a different one define their own fixture."""
    from tests.kit.tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="module")
def draft(target):
    """A draft that agrees with the target most of the time."""
    from tests.kit.tiny import perturbed

    return perturbed(target, noise=0.03)
