"""A third-party rule and task, found by their entry points in processes that never imported the package."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from reprieve.cli.main import main
from reprieve.errors import ReprieveError, SpecError
from reprieve.rules import RULES
from reprieve.specs import Registry
from tests.kit.plugin import install_plugin


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = install_plugin(tmp_path_factory.mktemp("site"))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def reprieve(environment, *arguments):
    command = [sys.executable, "-m", "reprieve.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_without_the_package_its_rule_is_unknown(capsys):
    assert "surprisal" not in RULES.names()
    assert main(["generate", "a", "--rule", "surprisal"]) == 2
    assert "rule must be one of" in capsys.readouterr().err


@pytest.mark.slow
def test_its_rule_and_task_run_in_worker_processes(environment, tmp_path):
    done = reprieve(
        environment,
        *("bench", "--arm", "surprisal:bits=6", "--task", "coins", "--limit", "3", "--workers", "2"),
        *("--skip", "target_only", "--skip", "draft_only", "--num-draft-tokens", "6", "--out", str(tmp_path / "run")),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "run" / "results.json").read_text())
    assert document["config"]["task"] == "coins"
    arm = document["arms"][-1]
    assert arm["spec"] == "surprisal:bits=6" and arm["num_problems"] == 3 and arm["num_rescued"] > 0
    assert arm["accuracy"] > 0


def test_its_rule_is_listed_with_its_dial(environment):
    done = reprieve(environment, "rules")
    assert done.returncode == 0, done.stderr
    assert "surprisal" in done.stdout and "bits" in done.stdout


@pytest.mark.slow
def test_the_playground_offers_its_rule_with_its_stops(environment):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "reprieve.cli.main", "serve", "--rule", "surprisal:bits=1", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        offer = ask(f"http://127.0.0.1:{port}/v1/reprieve", process)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    (rule,) = offer["rules"]
    assert rule["name"] == "surprisal" and rule["dial"] == "bits"
    assert rule["stops"] == [0.5, 1, 2, 4, 8]


def ask(url, process):
    for _ in range(300):
        assert process.poll() is None, process.communicate()[1]
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.loads(response.read())
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not come up")


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A package with unusable entry points: one cannot be imported, one has a different name than its class."""
    folder = tmp_path / "broken-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[broken.rules]\nmissing = not_a_module:Rule\nrenamed = reprieve.rules.margin:MarginRule\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return Registry("rule", "reprieve.rules", group="broken.rules")


def test_a_broken_package_is_named_and_skipped(broken):
    assert {"missing", "renamed"} <= set(broken.names())
    with pytest.raises(ReprieveError, match="rule 'missing' of package broken cannot be used: No module"):
        broken.get("missing")
    with pytest.raises(ReprieveError, match="must have name = 'renamed', got 'margin'"):
        broken.get("renamed")
    with pytest.warns(UserWarning, match="broken"):
        assert list(broken) == []


def test_a_name_belongs_to_one_class():
    registry = Registry("rule", "reprieve.rules")

    def make(module):
        return registry.register(type("ARule", (), {"name": "mine", "__module__": module}))

    make("first")
    make("first")  # a module that is imported again
    with pytest.raises(ReprieveError, match="rule 'mine' is registered twice: by first and by second"):
        make("second")
    with pytest.raises(SpecError, match=r"rule must be one of .*, got 'other'"):
        registry.get("other")
