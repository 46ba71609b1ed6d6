"""Supervisors of a program: killing one ends that program only, and no process outlives a grader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from reprieve.errors import ReprieveError
from reprieve.tasks import isolation
from reprieve.tasks import sandbox as module
from reprieve.tasks.isolation import MECHANISMS
from reprieve.tasks.sandbox import ResourceLimits, Sandbox
from reprieve.tasks.usage import descendants

SLEEPS = "import time\nprint('begun', flush=True)\ntime.sleep({mark})"


@pytest.fixture(scope="module", params=MECHANISMS, ids=lambda mechanism: mechanism.name)
def sandbox(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MECHANISMS", (request.param,))
        try:
            yield Sandbox(ResourceLimits(seconds=30.0, memory_mb=256, disk_mb=8, num_processes=8))
        except ReprieveError as error:
            pytest.skip(f"not on this host: {error}")


def begin(sandbox, mark):
    """Run a sleeping program in a thread; return the thread, the list for its result, and its three processes."""
    answers, before = [], set(descendants(os.getpid()))
    thread = threading.Thread(target=lambda: answers.append(sandbox.run(SLEEPS.format(mark=mark))))
    thread.start()
    found = wait_for(os.getpid(), 3, before)
    assert found
    return thread, answers, found


def wait_for(root, count, before=()):
    """Descendants of a process, once there are `count` of them and the last one is running."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [process for process in descendants(root) if process not in before]
        if len(found) >= count and is_running(found[-1]):
            time.sleep(0.5)
            return [process for process in descendants(root) if process not in before]
        time.sleep(0.05)
    return []


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids):
    deadline = time.monotonic() + 15
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_killing_any_process_of_a_program_ends_that_program_only(sandbox, level):
    thread, answers, processes = begin(sandbox, 20)
    other, others, theirs = begin(sandbox, 6)
    os.kill(processes[level], signal.SIGKILL)
    if level == 0:  # the isolation process: the program is run again
        again = wait_for(os.getpid(), 3, [*processes, *theirs])
        os.kill(again[0], signal.SIGKILL)
        processes += again
    thread.join(25)
    assert answers[0].exit_code != 0 and answers[0].seconds < 20
    assert ended(processes)
    other.join(25)
    assert others[0].exit_code == 0 and others[0].stdout == "begun\n"
    assert sandbox.passes("x = 1", "assert x == 1")


def test_broken_isolation_is_an_error_and_not_a_wrong_answer(sandbox, monkeypatch):
    monkeypatch.setattr(isolation, "_SYSTEM", ("/etc",))
    with pytest.raises(ReprieveError, match=f"can no longer be isolated by {sandbox.mechanism}: a first program"):
        sandbox.run("print(1)")


FAMILY = "import os, time\nif os.fork() == 0:\n    {setsid}\n    os.fork()\nprint('begun', flush=True)\ntime.sleep(50)"


CTRL_C = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background jobs


GRADE = (
    "from reprieve.tasks import sandbox as m; m.MECHANISMS = [x for x in m.MECHANISMS if x.name == 'CHOSEN']\n"
    "sandbox = m.Sandbox(m.ResourceLimits(seconds=60.0))\n"
)


def environment(**more):
    """Environment in which another interpreter finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def start(program, folder):
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("setsid", ["pass", "os.setsid()"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_grader(sandbox, tmp_path, how, setsid):
    program = f"{CTRL_C}{GRADE}sandbox.run({FAMILY.format(setsid=setsid)!r})"
    grader = start(program.replace("CHOSEN", sandbox.mechanism), tmp_path)
    pids = wait_for(grader.pid, 5)  # two supervisors and three processes of the program
    grader.send_signal(how)
    grader.wait(30)  # the program has 60 s
    assert len(pids) >= 5 and ended(pids)


def test_an_interrupted_run_ends_its_program(sandbox, tmp_path):
    """The interrupted process itself goes on, as a notebook does."""
    program = (
        f"{CTRL_C}{GRADE}import time\ntry:\n    sandbox.run({FAMILY.format(setsid='pass')!r})\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n    time.sleep(30)"
    )
    notebook = start(program.replace("CHOSEN", sandbox.mechanism), tmp_path)
    pids = wait_for(notebook.pid, 5)
    notebook.send_signal(signal.SIGINT)
    assert notebook.stdout.readline() == "interrupted\n" and len(pids) >= 5
    assert ended(pids) and notebook.poll() is None
    notebook.kill()
    notebook.wait()


def test_supervisors_take_no_modules_from_the_folder_and_no_secrets_from_the_environment(sandbox, tmp_path):
    for name in ("sandlock", "json", "ctypes"):
        (tmp_path / f"{name}.py").write_text("open('taken', 'w')")
    program = (
        f"import sys; sys.path = [path for path in sys.path if path]\n{GRADE}"
        "import os, threading, time\nfrom reprieve.tasks.usage import descendants\n"
        "thread = threading.Thread(target=sandbox.run, args=('import time; time.sleep(5)',))\nthread.start()\n"
        "while len(found := descendants(os.getpid())) < 2: time.sleep(0.05)\n"  # by then the first has finished exec
        "print(open(f'/proc/{next(iter(found))}/environ').read())\nthread.join()\n"
    )
    (tmp_path.parent / "grade.py").write_text(program.replace("CHOSEN", sandbox.mechanism))
    grade = [sys.executable, str(tmp_path.parent / "grade.py")]
    environ = environment(SECRET_API_KEY="hush")
    made = subprocess.run(grade, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert "HOME=" in made.stdout and "hush" not in made.stdout
    assert not (tmp_path / "taken").exists()


def test_a_forked_process_can_run_programs(sandbox):
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, sandbox.run("print(2)").stdout.encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as told:
        assert told.read() == "2\n"
    os.waitpid(child, 0)
    assert sandbox.run("print(3)").stdout == "3\n"
