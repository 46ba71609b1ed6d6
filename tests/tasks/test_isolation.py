"""Supervisors of programs: processes of their own, whose end is the end of one program and of nothing else."""

from __future__ import annotations

import contextlib
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


def test_a_program_whose_warden_was_killed_runs_again_and_then_gives_up(sandbox):
    thread, answers, levels = begin(sandbox, 2)
    os.kill(levels[0][0], signal.SIGKILL)
    thread.join(15)
    assert answers[0].exit_code == 0 and ended([pid for pids in levels for pid in pids])
    found = []

    def run():
        try:
            sandbox.run(SLEEPS.format(mark=30))
        except ReprieveError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 20
    while not found and time.monotonic() < deadline:
        for warden in next(iter(tree(fork_server._process.pid)), []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(warden, signal.SIGKILL)
        time.sleep(0.1)
    thread.join(10)
    assert "killed, twice" in found[0]


def test_the_end_of_the_server_costs_no_answer(sandbox):
    thread, answers, levels = begin(sandbox, 2)
    os.kill(fork_server._process.pid, signal.SIGKILL)
    thread.join(10)
    assert answers[0].exit_code == 0 and ended([pid for pids in levels for pid in pids])
    assert sandbox.passes("x = 1", "assert x == 1")


FAMILY = "import os, time\nif os.fork() == 0:\n    {setsid}\n    os.fork()\nprint('begun', flush=True)\ntime.sleep(50)"


CTRL_C = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background jobs


GRADE = "from reprieve.tasks.sandbox import Limits, Sandbox; Sandbox(Limits(seconds=60.0))"


def environment(**more):
    """In which another interpreter finds what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def start(program, folder):
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def family_of(grader):
    """Server, warden, supervisor and three of the program."""
    deadline = time.monotonic() + 30
    while sum(map(len, tree(grader.pid))) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pids in tree(grader.pid) for pid in pids]


@pytest.mark.parametrize("setsid", ["pass", "os.setsid()"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_who_grades(sandbox, tmp_path, how, setsid):
    program = f"{GRADE}.run({FAMILY.format(setsid=setsid)!r})"
    grader = start(CTRL_C + program, tmp_path)
    pids = family_of(grader)
    grader.send_signal(how)
    grader.wait(30)  # the program has 60 s
    assert len(pids) >= 6 and ended(pids)


def test_an_interrupted_run_ends_its_program(sandbox, tmp_path):
    """In a process that goes on, as a notebook does."""
    program = (
        f"{CTRL_C}import time\ntry:\n    {GRADE}.run({FAMILY.format(setsid='pass')!r})\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    time.sleep(30)"
    )
    notebook = start(program, tmp_path)
    pids = family_of(notebook)
    notebook.send_signal(signal.SIGINT)
    assert notebook.stdout.readline() == "interrupted\n" and len(pids) >= 6
    assert ended(pids[1:]) and is_running(pids[0])  # the server stays
    notebook.kill()
    notebook.wait()
    assert ended(pids)


def test_the_server_takes_nothing_from_the_current_folder_or_the_environment(sandbox, tmp_path):
    for name in ("sandlock", "json", "socket"):
        (tmp_path / f"{name}.py").write_text("open('taken', 'w')")
    program = (
        "import sys; sys.path = [path for path in sys.path if path]\n"
        "from reprieve.tasks.isolation import fork_server\nfrom reprieve.tasks.sandbox import Sandbox\n"
        "print(Sandbox().run('print(1)').stdout)\n"
        "print(open(f'/proc/{fork_server._process.pid}/environ').read())"
    )
    (tmp_path.parent / "grade.py").write_text(program)
    environ = environment(SECRET_API_KEY="hush")
    grade = [sys.executable, str(tmp_path.parent / "grade.py")]
    made = subprocess.run(grade, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert made.stdout.startswith("1\n") and "hush" not in made.stdout
    assert not (tmp_path / "taken").exists()


def test_the_end_does_not_wait_for_forked_processes(tmp_path):
    program = (
        "import os, time\nfrom reprieve.tasks.sandbox import Sandbox\n"
        "Sandbox().run('print(1)')\nif os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", program], env=environment(), cwd=tmp_path, check=True)
    assert time.monotonic() - began < 15


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
