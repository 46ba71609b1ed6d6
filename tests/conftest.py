"""One thread a process: the models are tiny, and threads that wait for a busy core cost more than they bring."""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too
os.environ["REPRIEVE_BUNDLES"] = str(Path(__file__).parent / "fixtures")  # of those processes, too

import pytest
import torch

collect_ignore = [] if find_spec("vllm") else ["vllm"]  # `make test-vllm` runs these, in an environment of its own

torch.set_num_threads(1)

if find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples at every run: what fails here fails everywhere. `--hypothesis-seed` looks for others.
    settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
    settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def bundled_pair():
    """The fixture pair, which most tests name, loaded once a worker."""
    from reprieve.engine import load_pair
    from tests.kit.pairs import ARITHMETIC

    return load_pair(ARITHMETIC.name, dtype="float32")


@pytest.fixture(scope="module")
def target():
    """A tiny random model; files that need another one have their own."""
    from tests.kit.tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="module")
def draft(target):
    """One that agrees with it most of the time."""
    from tests.kit.tiny import perturbed

    return perturbed(target, noise=0.03)
