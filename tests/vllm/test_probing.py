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
    listed = {part.path for part in probing.touched("v2" if V2 else "v1")} - PER_OUTPUT
    assert found == listed


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_the_installed_vllm_fits_live_and_as_source(kind):
    from pathlib import Path

    import vllm

    probing.require_parts(kind, probing.live)
    probing.require_parts(kind, in_source(Path(vllm.__file__).parents[1]))


SOURCE = """
class Sampler:
    def apply_sampling_params({}):
        pass

def rejection_sample({}):
    pass
"""
GOOD = ("self, logits, other=None, *, more=1", "target, drafts, *rest, fly_window=3, **kwargs")
PARTS = (
    probing.Part("some.module", "Sampler.apply_sampling_params", ("self", "logits"), called=True),
    probing.Part("some.module", "rejection_sample", ("target", "drafts")),
)


def probe(tmp_path, monkeypatch, *parameters):
    (tmp_path / "some").mkdir(exist_ok=True)
    (tmp_path / "some" / "module.py").write_text(SOURCE.format(*parameters))
    monkeypatch.setattr(probing, "parts", lambda kind: PARTS)
    probing.require_parts("v2", in_source(tmp_path))


def test_unknown_optional_parameters_are_accepted(tmp_path, monkeypatch):
    probe(tmp_path, monkeypatch, *GOOD)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (("self, scores", GOOD[1]), "Sampler.apply_sampling_params takes (self, scores), the plugin needs"),
        (("self, logits, seed", GOOD[1]), "takes (self, logits, seed), the plugin needs (self, logits) alone"),
        ((GOOD[0], "drafts, target"), "rejection_sample takes (drafts, target)"),
    ],
)
def test_incompatible_signatures_are_named(tmp_path, monkeypatch, parameters, said):
    with pytest.raises(ReprieveError, match=re.escape(said)):
        probe(tmp_path, monkeypatch, *parameters)


def test_missing_parts_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "parts", lambda kind: (probing.Part("some.module", "gone", ()),))
    with pytest.raises(ReprieveError, match=r"some\.module\.gone is not there"):
        probing.require_parts("v2", in_source(tmp_path))
    with pytest.raises(ReprieveError, match="is not there"):
        probing.require_parts("v2", probing.live)


def test_another_runner_is_refused():
    with pytest.raises(ReprieveError, match="V1 and V2 model runners, this is object"):
        probing.runner_kind(object())
