"""Probing vLLM's parts: the installed version, source trees, and changes that must be refused."""

import json
import re
import subprocess
import sys

import pytest

from reprieve.errors import ReprieveError
from reprieve.vllm_plugin import probing
from tests.vllm.runner import V2
from vllm_parts import in_source

# Patched on each asynchronous output, not on a class or on the runner.
PER_OUTPUT = {"vllm.v1.worker.gpu.async_utils.AsyncOutput.get_output"}


def test_the_listed_parts_are_exactly_the_touched_ones():
    made = subprocess.run(
        [sys.executable, "-m", "tests.vllm.touched"], capture_output=True, text=True, check=False, timeout=500
    )
    assert made.returncode == 0, made.stderr[-2000:]
    found = set(json.loads(made.stdout.splitlines()[-1]))
    parts = probing.PARTS["v2" if V2 else "v1"]
    listed = {part.path for part in parts if part.use != probing.USED} - PER_OUTPUT
    assert found == listed


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_the_installed_vllm_fits_live_and_as_source(kind):
    from pathlib import Path

    import vllm

    probing.require_parts(probing.PARTS[kind], probing.live)
    probing.require_parts(probing.PARTS[kind], in_source(Path(vllm.__file__).parents[1]))


SOURCE = """
class Sampler:
    def apply_sampling_params({}):
        pass

def rejection_sample({}):
    pass
"""
GOOD = ("self, logits, other=None, *, more=1", "target, drafts, *rest, fly_window=3, **kwargs")
PARTS = (
    probing.Part("some.module", "Sampler.apply_sampling_params", "self logits", called=True),
    probing.Part("some.module", "rejection_sample", "target drafts"),
)


def probe(tmp_path, *parameters):
    (tmp_path / "some").mkdir(exist_ok=True)
    (tmp_path / "some" / "module.py").write_text(SOURCE.format(*parameters))
    probing.require_parts(PARTS, in_source(tmp_path))


def test_unknown_optional_parameters_are_accepted(tmp_path):
    probe(tmp_path, *GOOD)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (("self, scores", GOOD[1]), "Sampler.apply_sampling_params takes (self, scores), the plugin needs"),
        (("self, logits, seed", GOOD[1]), "takes (self, logits, seed), the plugin needs (self, logits) alone"),
        ((GOOD[0], "drafts, target"), "rejection_sample takes (drafts, target)"),
    ],
)
def test_incompatible_signatures_are_named(tmp_path, parameters, said):
    with pytest.raises(ReprieveError, match=re.escape(said)):
        probe(tmp_path, *parameters)


def test_missing_parts_are_named(tmp_path):
    gone = [probing.Part("some.module", "gone")]
    with pytest.raises(ReprieveError, match=r"some\.module\.gone is not there"):
        probing.require_parts(gone, in_source(tmp_path))
    with pytest.raises(ReprieveError, match="is not there"):
        probing.require_parts(gone, probing.live)


def test_another_runner_is_refused():
    with pytest.raises(ReprieveError, match="V1 and V2 model runners, this is object"):
        probing.runner_kind(object())
