"""Generated code: what it may not do, what it may, and programming tasks graded by running it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
import zlib

import pytest

from reprieve.errors import ReprieveError, SpecError
from reprieve.tasks import load_task
from reprieve.tasks import sandbox as module
from reprieve.tasks.sandbox import Limits, Sandbox, passes

LIMITS = Limits(seconds=2.0, memory_mb=256, disk_mb=8, num_processes=8)


@pytest.fixture(scope="module")
def sandbox():
    try:
        return Sandbox(LIMITS)
    except ReprieveError as error:
        pytest.skip(f"no isolation on this host: {error}")


def test_programs_read_write_and_leave_nothing(sandbox, tmp_path):
    finished = sandbox.run("open('f', 'w').write('x'); print(input()[::-1], open('f').read())", "abc\n")
    assert (finished.exit_code, finished.stdout, finished.timed_out) == (0, "cba x\n", False)
    assert not [name for name in os.listdir("/tmp") if name.startswith(("reprieve-program-", "reprieve-writes-"))]


ESCAPES = {
    "a file outside": "open('/tmp/reprieve-escape', 'w').write('x')",
    "a file above": "open('../reprieve-escape', 'w').write('x')",
    "a file in the home folder": "open('/root/reprieve-escape', 'w').write('x')",
    "reading secrets": "print(open('/etc/shadow').read())",
    "reading the environment of others": "print(open('/proc/1/environ', 'rb').read())",
    "a link to outside": "import os; os.symlink('/tmp', 'out'); open('out/reprieve-escape', 'w').write('x')",
    "a connection": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "a datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "a listening port": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "killing the parent": "import os; os.kill(os.getppid(), 9)",
    "a large file": "f = open('f', 'wb')\nfor _ in range(64): f.write(b'x' * (1 << 20))",
    "many files": "for i in range(64): open(f'f{i}', 'wb').write(b'x' * (1 << 20))",
    "endless output": "while True: print('x' * 100000)",
    "a memory bomb": "x = bytearray(1 << 30)",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "raising its own limits": "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1 << 40, 1 << 40))",
    "tracing others": "import ctypes; raise SystemExit(ctypes.CDLL(None).ptrace(16, 1, 0, 0))",
    "mounting": "import ctypes; raise SystemExit(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None))",
}


@pytest.fixture(scope="module")
def port():
    """A server that must never be reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        yield server.getsockname()[1]
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_are_stopped(sandbox, port, name):
    finished = sandbox.run(ESCAPES[name].replace("PORT", str(port)))
    assert finished.exit_code != 0, f"{name} went through: {finished.stdout[:200]}"
    assert len(finished.stdout) <= LIMITS.disk_mb << 20
    for path in ("/tmp/reprieve-escape", "/root/reprieve-escape"):
        assert not os.path.exists(path)


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_programs_that_do_not_end_are_ended(sandbox, program):
    started = time.monotonic()
    finished = sandbox.run(program)
    assert finished.exit_code != 0 and time.monotonic() - started < 10


def test_children_do_not_outlive_their_program(sandbox):
    mark = f"31{os.getpid()}"
    finished = sandbox.run(
        f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep({mark})'], "
        "start_new_session=True)\nprint('left')"
    )
    time.sleep(0.3)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep({mark})" not in running, finished


def test_programs_run_from_other_threads(sandbox):
    found = []
    thread = threading.Thread(target=lambda: found.append(sandbox.run("print(1)").stdout))
    thread.start()
    thread.join()
    assert found == ["1\n"]


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.remove('stdout')",
        "import os; os.remove('stdout'); os.mkdir('stdout')",
        "import os; os.remove('stdout'); os.mkfifo('stdout')",
        "import os; os.remove('stdout'); os.symlink('/etc/passwd', 'stdout')",
    ],
)
def test_programs_that_replace_their_output_have_none(sandbox, program):
    started = time.monotonic()
    assert sandbox.run(program).stdout == "" and time.monotonic() - started < 10


def test_leaving_early_is_not_passing(sandbox):
    assert passes(sandbox, "x = 1", "assert x == 1")
    assert not passes(sandbox, "x = 1", "assert x == 2")
    for early in ("raise SystemExit(0)", "import os; os._exit(0)", "print('ok'); exit()"):
        assert not passes(sandbox, early, "assert False")


def test_without_isolation_nothing_runs_unless_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sandlock", None)
    with pytest.raises(ReprieveError, match=r"isolation, which this host lacks.*reprieve\[code\].*unsafe=true"):
        Sandbox()
    (tmp_path / "h.jsonl").write_text(json.dumps(HUMANEVAL) + "\n")
    with pytest.raises(ReprieveError, match="isolation"):
        load_task(f"humaneval:path={tmp_path / 'h.jsonl'}")
    told = Sandbox(Limits(seconds=1.0), unsafe=True)
    assert not told.isolated
    assert told.run("print(input())", "x").stdout == "x\n"
    assert told.run("while True: pass").timed_out
    assert told.run("x = bytearray(4 << 30)").exit_code != 0


def test_old_kernels_are_told_apart(monkeypatch):
    sandlock = pytest.importorskip("sandlock")
    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: 1)
    with pytest.raises(ReprieveError, match="Landlock has version 1"):
        module.Sandbox()


@pytest.mark.parametrize("values", [dict(seconds=0), dict(memory_mb=1), dict(disk_mb=0), dict(num_processes=0)])
def test_limits_out_of_range_are_refused(values):
    with pytest.raises(SpecError, match=next(iter(values))):
        Limits(**values)


HUMANEVAL = {
    "task_id": "Test/0",
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """ Add up. """\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(numbers)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
STDIN = {
    "question_id": "1",
    "question_content": "Double the number.",
    "contest_date": "2024-09-01T00:00:00",
    "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
FUNCTIONAL = {
    "question_id": "2",
    "question_content": "Add two numbers.",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        ",
    "contest_date": "2024-03-01T00:00:00",
    "public_test_cases": json.dumps([{"input": "1\n2", "output": "[3]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}


def packed(cases):
    """As LiveCodeBench packs private tests: a compressed pickle of one text, here written by hand."""
    text = json.dumps(cases).encode()
    content = b"\x80\x04X" + len(text).to_bytes(4, "little") + text + b"\x94."
    return base64.b64encode(zlib.compress(content)).decode()


def test_humaneval_grades_completions_and_whole_programs(sandbox, tmp_path):
    path = tmp_path / "h.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(HUMANEVAL) + "\n").encode()))
    task = load_task(f"humaneval:path={path},seconds=2")
    problem = task.problems("test", 5)[0]
    assert problem.prompt == HUMANEVAL["prompt"]
    whole = "Here it is:\n```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```\nDone."
    for text, right in (
        (HUMANEVAL["canonical_solution"], True),
        (whole, True),
        ("    return sum(numbers) + 1\n", False),
        ("    while True: pass\n", False),
        ("    return sum(numbers\n", False),
    ):
        assert task.equivalent(task.extract_answer(text), problem.reference) is right, text
    assert not task.equivalent(task.extract_answer(""), problem.reference)
    assert task.same(problem, "    return sum(numbers)", "    return sum(list(numbers))")
    assert not task.same(problem, "    return sum(numbers)", "    return 0")


def test_livecodebench_runs_stdin_and_functional_tests(sandbox, tmp_path):
    private = packed([{"input": "5\n", "output": "10.0\n", "testtype": "stdin"}])
    rows = [{**STDIN, "private_test_cases": private}, FUNCTIONAL]
    path = tmp_path / "lcb.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(f"livecodebench:path={path},seconds=2")
    first, second = task.problems("test", 10)
    assert len(json.loads(first.reference)["tests"]) == 2, "public and private tests"
    good = task.extract_answer("```python\nprint(2 * int(input()))\n```")
    assert task.verdicts(good, first.reference) == [True, True]
    assert task.verdicts("print(4)", first.reference) == [True, False]
    assert not task.equivalent("print(4)", first.reference)
    assert "class Solution" in second.prompt
    method = "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return [a + b]"
    assert task.equivalent(method, second.reference)
    assert not task.equivalent(method.replace("a + b", "a - b"), second.reference)
    assert task.extract_answer("no code") is None
    dated = load_task(f"livecodebench:path={path},since=2024-06-01")
    assert [problem.problem_id for problem in dated.problems("test", 10)] == ["lcb-1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**STDIN, "public_test_cases": "[]"}, "no tests"),
        ({**STDIN, "public_test_cases": "[{}]"}, "test cases cannot be read"),
        ({**STDIN, "private_test_cases": "!!"}, "test cases cannot be read"),
        ({**FUNCTIONAL, "metadata": "{}"}, "no func_name"),
        ({"question_id": "1", "public_test_cases": STDIN["public_test_cases"]}, "question_content"),
    ],
)
def test_broken_program_files_are_told_with_their_line(sandbox, tmp_path, row, message):
    path = tmp_path / "lcb.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ReprieveError, match=rf"line 1.*{message}|{message}.*line 1"):
        load_task(f"livecodebench:path={path}").problems("test", 1)


def test_packed_tests_are_read_and_never_executed(sandbox, tmp_path):
    """A pickle that would run a command when loaded."""
    evil = b"cos\nsystem\n(S'touch /tmp/reprieve-escape'\ntR."
    row = {**STDIN, "private_test_cases": base64.b64encode(zlib.compress(evil)).decode()}
    path = tmp_path / "lcb.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ReprieveError):
        load_task(f"livecodebench:path={path}").problems("test", 1)
    assert not os.path.exists("/tmp/reprieve-escape")
