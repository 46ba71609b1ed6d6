"""Supervisors of programs: processes of their own, whose end is the end of one program and of nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from reprieve.errors import ReprieveError
from reprieve.tasks.isolation import fork_server
from reprieve.tasks.sandbox import Limits, Sandbox

SLEEPS = "import time\nprint('begun', flush=True)\ntime.sleep({mark})"


@pytest.fixture(scope="module")
def sandbox():
    try:
        return Sandbox(Limits(seconds=20.0, memory_mb=256, disk_mb=8, num_processes=8))
    except ReprieveError as error:
        pytest.skip(f"no isolation on this host: {error}")


def tree(pid):
    """Its descendants, parents first."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines())
    found, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found.append(level)
    return [level for level in found if level]


def begin(sandbox, mark):
    """A sleeping program in a thread; where its answer comes, and its processes by level: warden, supervisor, it."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(sandbox.run(SLEEPS.format(mark=mark))))
    thread.start()
    deadline = time.monotonic() + 10
    while len(levels := tree(fork_server._process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(levels) >= 3
    return thread, answers, levels


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids):
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


@pytest.mark.parametrize("level", [1, 2], ids=["supervisor", "program"])
def test_the_end_of_a_supervisor_ends_one_program(sandbox, level):
    thread, answers, levels = begin(sandbox, 30)
    other, others, _ = begin(sandbox, 3)
    os.kill(levels[level][0], signal.SIGKILL)
    thread.join(10)
    assert answers[0].exit_code != 0 and answers[0].seconds < 15
    assert ended([pid for pids in levels for pid in pids])
    other.join(10)
    assert others[0].exit_code == 0 and others[0].stdout == "begun\n"
    assert sandbox.passes("x = 1", "assert x == 1")


def test_the_end_of_the_server_is_survived(sandbox):
    thread, answers, levels = begin(sandbox, 30)
    os.killpg(fork_server._process.pid, signal.SIGKILL)
    thread.join(10)
    assert answers[0].exit_code != 0
    assert ended([pid for pids in levels for pid in pids])
    assert sandbox.passes("x = 1", "assert x == 1")


def test_nothing_outlives_who_grades(sandbox, tmp_path):
    program = f"from reprieve.tasks.sandbox import Sandbox\nSandbox().run({SLEEPS.format(mark=25)!r})"
    grader = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    deadline = time.monotonic() + 30
    while len(levels := tree(grader.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    levels = tree(grader.pid)
    grader.kill()
    grader.wait()
    assert len(levels) >= 4
    assert ended([pid for pids in levels for pid in pids])


def test_a_forked_process_has_a_server_of_its_own(sandbox):
    sandbox.run("print(1)")
    server = fork_server._process.pid
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, f"{sandbox.run('print(2)').stdout} {fork_server._process.pid != server}".encode())
        fork_server.close()
        os._exit(0)
    os.close(writes)
    with open(reads) as told:
        assert told.read() == "2\n True"
    os.waitpid(child, 0)
    assert sandbox.run("print(3)").stdout == "3\n" and fork_server._process.pid == server


def test_what_the_kernel_refuses_is_said():
    with pytest.raises(OSError, match="Error"):
        fork_server.run({"max_memory": "nothing"}, ["/bin/true"], None, 5.0)
