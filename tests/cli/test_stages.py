"""Commands that run other commands: what they started ends with them."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from reprieve.cli.stages import Stage, StageFailed, Stages


@pytest.fixture
def sleeping(monkeypatch):
    """Stages that sleep, in place of commands."""
    started = []
    popen = subprocess.Popen

    def start(command, **options):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def interruptible():
    """A shell's background job, and all it starts, ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_stage_ends_with_those_beside_it(sleeping, tmp_path, interruptible):
    stages = Stages(tmp_path, "account")
    stages.start(Stage("beside", ["x"]))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        stages.run(Stage("one", ["y"]))
    deadline = time.monotonic() + 10
    while any(process.poll() is None for process in sleeping) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process.returncode for process in sleeping] == [-signal.SIGTERM] * 2
    assert not (tmp_path / "account.json").exists()


def test_a_failed_stage_ends_those_beside_it(sleeping, tmp_path):
    stages = Stages(tmp_path, "account")
    stages.start(Stage("beside", ["x"]))
    stage = Stage("one", ["y"])
    stages.start(stage)
    sleeping[1].kill()
    with pytest.raises(StageFailed) as failed:
        stages.run(stage)
    assert stages.tell(failed.value) == 1
    assert sleeping[0].wait(10) == -signal.SIGTERM
