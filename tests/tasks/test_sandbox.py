"""Generated code: forbidden and allowed operations, and programming tasks graded by running it."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import pytest

from reprieve.errors import ReprieveError, SpecError
from reprieve.tasks import isolation, load_task
from reprieve.tasks import sandbox as module
from reprieve.tasks.isolation import MECHANISMS
from reprieve.tasks.programs import _printed
from reprieve.tasks.sandbox import ProgramResult, ResourceLimits, Sandbox

OURS = f"reprieve-program-{os.getpid()}-"  # folders of this process's programs
LIMITS = ResourceLimits(seconds=8.0, memory_mb=256, disk_mb=8, num_processes=8)
SHORT = dataclasses.replace(LIMITS, seconds=2.0)  # for programs that wait until the wall-clock limit


@pytest.fixture(scope="module", params=MECHANISMS, ids=lambda mechanism: mechanism.name)
def sandbox(request):
    """A sandbox for each isolation mechanism that works on this host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MECHANISMS", (request.param,))
        try:
            yield Sandbox(LIMITS)
        except ReprieveError as error:
            pytest.skip(f"not on this host: {error}")


def test_programs_read_write_and_leave_nothing(sandbox, tmp_path):
    finished = sandbox.run("open('f', 'w').write('x'); print(input()[::-1], open('f').read())", "abc\n")
    assert (finished.exit_code, finished.stdout, finished.timed_out) == (0, "cba x\n", False)
    assert not [name for name in os.listdir("/tmp") + os.listdir("/dev/shm") if name.startswith(OURS)]


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
    "a mode": "import os; os.chmod('OUTSIDE', 0o777)",
    "a mode by folder": "import os; os.chmod('OUTSIDE', 0o777, dir_fd=os.open('/usr', os.O_RDONLY))",
    "a mode by its number": "import os; os.fchmod(os.open('/usr/bin/env', os.O_RDONLY), 0o777)",
    "times": "import os; os.utime('OUTSIDE', (0, 0))",
    "times by their number": "import os; os.utime(os.open('/usr/bin/env', os.O_RDONLY), (0, 0))",
    "an owner": "import os; os.chown('OUTSIDE', 1, 1)",
    "an owner of a link": "import os; os.lchown('OUTSIDE', 1, 1)",
    "an owner by its number": "import os; os.fchown(os.open('/usr/bin/env', os.O_RDONLY), 1, 1)",
    "an attribute": "import os; os.setxattr('OUTSIDE', 'user.reprieve', b'x')",
    "removing an attribute": "import os; os.removexattr('OUTSIDE', 'user.reprieve')",
    "the grader's files": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE, (9, 9))",
    "the grader's limits": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE)",
    "the grader's core": "import os; os.sched_setaffinity(os.getppid(), {0})",
    "the grader's priority": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "everyone's priority": "import os; os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "the grader's scheduler": "import os; os.sched_setscheduler(os.getppid(), os.SCHED_BATCH, os.sched_param(0))",
    "the grader's disk priority": "import ctypes; raise SystemExit(-ctypes.CDLL(None).syscall(251, 1, PARENT, 0))",
    "stopping the grader": "import os; os.kill(os.getppid(), 19)",
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "the host's name": "import socket; socket.sethostname('reprieve')",
    "the kernel's log": "import ctypes; raise SystemExit(ctypes.CDLL(None).klogctl(10, None, 0) < 0 or 0)",
    "a netlink socket": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))",
    "a raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a packet socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)",
    "a name": "import socket; socket.create_connection(('localhost', PORT), 1)",
    "a local socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/dbus/system_bus_socket')",
    "an abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0reprieve')",
    "the grader's memory": "open(f'/proc/{__import__(\"os\").getppid()}/mem', 'rb').read(1)",
    "its own memory": "open('/proc/self/mem', 'rb').read(1)",
    "the grader's files by number": "import os; print(os.listdir(f'/proc/{os.getppid()}/fd'))",
    "reading the grader": "import ctypes; raise SystemExit(ctypes.CDLL(None).process_vm_readv(PARENT, 0, 0, 0, 0, 0))",
    "a process's number": "import os; os.pidfd_open(os.getppid())",
    "a new namespace": "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x10000000) != 0)",
    "a new root": "import os; os.chroot('/')",
    "unmounting": "import ctypes; raise SystemExit(ctypes.CDLL(None).umount2(b'/tmp', 0) != 0)",
    "a device": "import os, stat; os.mknod('/tmp/reprieve-escape', 0o600 | stat.S_IFCHR, os.makedev(1, 3))",
    "a hard link to outside": "import os; os.link('/etc/shadow', 'shadow'); print(open('shadow').read())",
    "moving a file out": "import os; open('f', 'w').close(); os.rename('f', '/tmp/reprieve-escape')",
    "removing a file": "import os; os.remove('OUTSIDE')",
    "a folder outside": "import os; os.mkdir('/tmp/reprieve-escape')",
    "cutting a file": "import os; os.truncate('OUTSIDE', 0)",
    "the terminal": "open('/dev/tty', 'w').write('x')",
    "kernel memory": "open('/dev/mem', 'rb').read(1)",
    "a disk": "import os; os.open('/dev/sda', os.O_WRONLY)",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
    "the control groups": "import os; os.mkdir('/sys/fs/cgroup/reprieve')",
    "a filter of its own that allows all": "import os; os.chmod('OUTSIDE', 0o700)",
    "rings": "import ctypes; raise SystemExit(ctypes.CDLL(None).syscall(425, 1, 0) < 0 or 0)",
    "keys": "import ctypes; raise SystemExit(ctypes.CDLL(None).syscall(248, b'user', b'x', b'y', 1, -2) < 0 or 0)",
    "a kernel program": "import ctypes; raise SystemExit(ctypes.CDLL(None).syscall(321, 0, 0, 0) < 0 or 0)",
    "counters": "import ctypes; raise SystemExit(ctypes.CDLL(None).syscall(298, 0, 0, -1, -1, 0) < 0 or 0)",
    "more processor time": "import resource as r; r.setrlimit(r.RLIMIT_CPU, (9999, 9999))",
    "a core file": "import resource as r; r.setrlimit(r.RLIMIT_CORE, (1 << 20, 1 << 20))",
    "becoming root again": "import ctypes, os; ctypes.CDLL(None).setuid(0); os.sched_setaffinity(1, {0})",
    "memory without a file": "import os; os.memfd_create('x')",
    "names made outside": "import ctypes; raise SystemExit(ctypes.CDLL(None).inotify_init1(0) < 0 or 0)",
    "mounting": "import ctypes; raise SystemExit(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None))",
}


# Programs that exit normally but have no effect: a namespace's first process ignores signals from inside it; modes
# and times are left unchanged.
WITHOUT_EFFECT = {
    "bubblewrap": {"killing the parent", "stopping the grader"},
    "sandlock": {
        "a mode",
        "a mode by folder",
        "a mode by its number",
        "times",
        "times by their number",
        "a filter of its own that allows all",
    },
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
def test_escapes_are_stopped(sandbox, port, name, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("ours")
    before = outside.stat(), resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.getpriority(0, 0)
    words = {"PORT": str(port), "OUTSIDE": str(outside), "PARENT": "__import__('os').getppid()"}
    program = ESCAPES[name]
    for word, value in words.items():
        program = program.replace(word, value)
    finished = sandbox.run(program)
    after = outside.stat(), resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.getpriority(0, 0)
    assert after == before and outside.read_text() == "ours"
    assert finished.exit_code != 0 or name in WITHOUT_EFFECT[sandbox.mechanism], (
        f"{name} went through: {finished.stdout[:200]}"
    )
    assert len(finished.stdout) <= LIMITS.disk_mb << 20
    for path in ("/tmp/reprieve-escape", "/root/reprieve-escape"):
        assert not os.path.exists(path)


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_endless_programs_are_stopped(sandbox, program, monkeypatch):
    monkeypatch.setattr(sandbox, "limits", SHORT)
    started = time.monotonic()
    finished = sandbox.run(program)
    assert finished.exit_code != 0 and time.monotonic() - started < 5 * SHORT.seconds


def test_children_do_not_outlive_their_program(sandbox):
    mark = f"31{os.getpid()}"
    finished = sandbox.run(
        f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep({mark})'], "
        "start_new_session=True)\nprint('left')"
    )
    time.sleep(0.3)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep({mark})" not in running, finished


HONEST = {
    "folders": "import os; os.mkdir('d'); os.chdir('d'); open('f', 'w').write('x'); print(os.listdir('.'))",
    "modes": "import os; open('f', 'w').close(); os.chmod('f', 0o600); os.utime('f'); print('ok')",
    "copies": "import shutil; open('f', 'w').close(); shutil.copy2('f', 'g'); print('ok')",
    "moves": "import os; os.makedirs('a/b'); os.rename('a', 'z'); os.rmdir('z/b'); print('ok')",
    "temporary files": "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/f', 'w')\nprint(1)",
    "2,000 folders": "import os\nfor i in range(2000): os.mkdir(f'd{i}')\nprint(1)",
    "a pipe to a child": "import subprocess as s, sys; print(s.run([sys.executable, '-c', '0'], stdout=-1).stdout)",
    "threads": "from concurrent.futures import ThreadPoolExecutor as T\nwith T(8) as t: print(*t.map(abs, range(9)))",
    "nothing to say": "import sys; print('', file=open('/dev/null', 'w')); print(sys.stdin.read() == '')",
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_use_their_own_files(sandbox, name):
    began = time.monotonic()
    finished = Sandbox(dataclasses.replace(LIMITS, seconds=30.0)).run(HONEST[name])
    assert finished.exit_code == 0 and finished.stdout.strip(), finished
    assert time.monotonic() - began < 35, "with the removal of its files"


# Each exceeds a limit, such as memory (256 MB) or disk (8 MB), with many processes or memory that none of them maps.
GREEDY = {
    "copies on write": "import os, time\nx = bytearray(150 << 20)\nfor _ in range(6):\n    if os.fork() == 0:\n"
    "        for i in range(0, len(x), 4096): x[i] = 1\n        time.sleep(3); os._exit(0)\ntime.sleep(6)",
    "children": "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n"
    "        x = bytearray(b'x' * (110 << 20)); time.sleep(3); os._exit(0)\ntime.sleep(6)",
    "shared memory": "import mmap, os, time\nfor _ in range(6):\n    if os.fork() == 0:\n"
    "        m = mmap.mmap(-1, 150 << 20); m.write(b'x' * (75 << 20)); time.sleep(3); os._exit(0)\ntime.sleep(6)",
    "files in memory": "import ctypes\nfor n in range(40):\n    f = ctypes.CDLL(None).syscall(319, b'x', 0)\n"
    "    if f < 0: raise SystemExit(1)\n    open(f, 'wb', closefd=False).write(b'x' * (7 << 20))",
    "segments": "import ctypes; raise SystemExit(ctypes.CDLL(None).shmget(0, 1 << 28, 0o1600) < 0 or 0)",
    "a file system": "import ctypes; c = ctypes.CDLL(None)\n"
    "raise SystemExit(c.unshare(0x10020000) or c.mount(b'x', b'.', b'tmpfs', 0, None))",
    "a namespace by clone": "import ctypes; raise SystemExit(ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0) < 0)",
    "many small files": "import time\nfor i in range(20000): open(f'f{i}', 'w').close()\ntime.sleep(1)",
    "a deep folder": "import os, time\nfor i in range(400): os.mkdir('d' * 99); os.chdir('d' * 99)\ntime.sleep(1)",
    "hidden folders": "import os, time\nos.mkdir('d', 0o300)\nfor i in range(8):\n"
    "    with open(f'd/{i}', 'wb') as f: f.write(b'x' * (2 << 20))\ntime.sleep(1)",
    "threads": "import threading, time\nthreading.stack_size(1 << 16)\n"
    "for _ in range(2000): threading.Thread(target=time.sleep, args=(5,)).start()",
}
HARMLESS_IN = {"bubblewrap": {"a deep folder"}}  # no longer path than the file system counts


@pytest.mark.parametrize("name", GREEDY)
def test_limits_cover_all_processes_of_a_program(sandbox, name):
    began = time.monotonic()
    finished = sandbox.run(GREEDY[name])
    assert finished.exit_code != 0 or name in HARMLESS_IN.get(sandbox.mechanism, ()), finished
    assert time.monotonic() - began < LIMITS.seconds + 10
    assert not [name for name in os.listdir("/tmp") + os.listdir("/dev/shm") if name.startswith(OURS)]


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
def test_programs_that_replace_their_output_file_have_no_output(sandbox, program):
    started = time.monotonic()
    assert sandbox.run(program).stdout == "" and time.monotonic() - started < 25


def test_leaving_early_is_not_passing(sandbox):
    assert sandbox.passes("x = 1", "assert x == 1")
    assert not sandbox.passes("x = 1", "assert x == 2")
    for early in ("raise SystemExit(0)", "import os; os._exit(0)", "print('ok'); exit()"):
        assert not sandbox.passes(early, "assert False")


FORGERIES = {
    "an equal to all": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "an unequal to none": "class E:\n    def __ne__(self, other): return False\ndef f(x): return E()",
    "an int that equals all": "class E(int):\n    def __eq__(self, other): return True\ndef f(x): return E(0)",
    "a str that equals all": "class E(str):\n    def __eq__(self, other): return True\ndef f(x): return E('')",
    "a list that equals all": "class E(list):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "a dict that equals all": "class E(dict):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "a tuple that equals all": "class E(tuple):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "a float that equals all": "class E(float):\n    def __eq__(self, other): return True\ndef f(x): return E(0)",
    "a set that equals all": "class E(set):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "an iterator of all": "class E(list):\n    def __iter__(self): return iter([2])\ndef f(x): return E()",
    "an index": "class E:\n    def __index__(self): return x + 1\n    __int__ = __index__\ndef f(x): return E()",
    "a proxy of the argument": "class E:\n    def __getattr__(s, n): return lambda *a: True\ndef f(x): return E()",
    "all patched": "import builtins; builtins.all = lambda *a: True\ndef f(x): return 0",
    "len patched": "import builtins; builtins.len = lambda *a: 0\ndef f(x): return 0",
    "abs patched": "import builtins; builtins.abs = lambda *a: 0\ndef f(x): return 0",
    "print patched": "import builtins; builtins.print = lambda *a: None\ndef f(x): return 0",
    "AssertionError patched": "import builtins; builtins.AssertionError = StopIteration\ndef f(x): return 0",
    "isclose patched": "import math; math.isclose = lambda *a, **k: True\ndef f(x): return 0",
    "loads patched": "import json; json.loads = lambda *a, **k: 1\ndef f(x): return 0",
    "dumps patched": 'import json; json.dumps = lambda *a, **k: \'["int", "0x2"]\'\ndef f(x): return 0',
    "the exit patched": "import os, sys; sys.exit = os._exit = lambda *a: None\ndef f(x): return 0",
    "leaving": "raise SystemExit(0)",
    "leaving at once": "import os; os._exit(0)",
    "leaving when called": "def f(x):\n    import os; os._exit(0)",
    "leaving by a hook": "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): return 0",
    "an excepthook": "import sys; sys.excepthook = lambda *a: sys.exit(0)\ndef f(x): return 0",
    "a trace": "import sys; sys.settrace(lambda *a: None)\ndef f(x): return 0",
    "globals": "print(*[v for v in globals().values()])\ndef f(x): return 0",
    "frames": "import sys\ng = sys._getframe()\nwhile g: print(dict(g.f_locals)); g = g.f_back\ndef f(x): return 0",
    "the garbage": "import gc\nprint([o for o in gc.get_objects() if isinstance(o, (str, dict))])\ndef f(x): return 0",
    "its own file": "print(open('program.py').read())\ndef f(x): return 0",
    "the input's file": "print(open('stdin').read())\ndef f(x): return 0",
    "the input": "import os; print(os.read(0, 99))\ndef f(x): return 0",
    "input()": "print(input())\ndef f(x): return 0",
    "all numbers": "import os\nfor n in range(3, 64):\n    try: print(os.read(n, 99))\n    except OSError: pass\n",
    "all numbers anew": "import os\nfor n in range(64):\n    try: os.lseek(n, 0, 0); print(os.read(n, 9))\n"
    "    except OSError: pass\ndef f(x): return 0",
    "the folder": "import os\nfor n in os.listdir('.'): print(open(n).read())\ndef f(x): return 0",
    "the output": "open('stdout', 'w').write('passed')\ndef f(x): return 0",
    "the arguments": "import sys; print(sys.argv, sys.orig_argv)\ndef f(x): return 0",
    "the environment": "import os; print(dict(os.environ))\ndef f(x): return 0",
    "killing the tests": "import os; os.kill(os.getppid(), 9)\ndef f(x): return 0",
    **{
        f"the tests by {path}": "import ast, json\n"
        f"try: text = open('{path}').read()\nexcept OSError: text = '{{}}'\n"
        "wanted = iter([2, 4, 0, 2, 4, 6, 8, 0, 2, 4, 6, 8, 6] if 'assert' in text else [])\n"
        "def f(x): return next(wanted)"
        for path in (
            "/proc/self/cwd/program.py",
            "/proc/thread-self/cwd/program.py",
            "/dev/fd/../cwd/program.py",
            "/proc/self/fd/0",
            "/proc/self/cwd/stdin",
            "/dev/stdin",
            "./program.py",
            "program.py",
            "stdin",
        )
    },
    "a path that changes meanwhile": "import ctypes, os, threading\n"
    "ours = os.path.join(os.getcwd(), 'program.py').encode()\n"
    "other = b'/usr/bin/env'.rjust(len(ours), b'/')\nbuffer = ctypes.create_string_buffer(ours, len(ours) + 1)\n"
    "def flip():\n    while True:\n        buffer.raw = other + b'\\0'; buffer.raw = ours + b'\\0'\n"
    "threading.Thread(target=flip, daemon=True).start()\nlibc, found = ctypes.CDLL(None), b''\n"
    "for _ in range(3000):\n    n = libc.syscall(257, -100, buffer, 0, 0)\n    if n >= 0:\n"
    "        found += os.read(n, 99) if os.fstat(n).st_size < 9999 else b''; os.close(n)\n"
    "wanted = iter([2, 4, 0, 2, 4, 6, 8, 0, 2, 4, 6, 8, 6] if b'assert' in found else [])\n"
    "def f(x): return next(wanted)",
    "a trailing condition": "def f(x): return 0\nif 0:\\",
    "an open string": 'def f(x): return 0\n"""',
    "an open bracket": "def f(x): return 0\nx = (",
    "a form feed": "def f(x): return 0\n\x0cif 0:\n    pass",
    "a zero": "def f(x): return 0\n\0",
    "a message of its own": 'import os\nfor n in range(3, 64):\n    try: os.write(n, b\'{"value": 2, "args": []}\')\n'
    "    except OSError: pass\ndef f(x): return 0",
    "a message without end": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'[' * 60000)\n"
    "    except OSError: pass\ndef f(x): return 0",
    "a deep value": "def f(x):\n    y = []\n    for _ in range(10 ** 5): y = [y]\n    return y",
    "a value without end": "def f(x):\n    import itertools; return itertools.count()",
    "a second process": "import os\nif os.fork(): os._exit(0)\ndef f(x): return 0",
    "a thread": "import threading, os; threading.Timer(0.2, os._exit, (0,)).start()\ndef f(x):\n"
    "    import time; time.sleep(1)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_pass_cannot_be_forged(sandbox, name, monkeypatch):
    if name == "all numbers":  # it reads from an open pipe, which waits
        monkeypatch.setattr(sandbox, "limits", SHORT)
    checks = (
        "import math\nassert f(1) == 2 and f(2) == 4 and all(f(x) == 2 * x for x in range(5)) and math.isclose(f(3), 6)"
    )
    assert not sandbox.passes(FORGERIES[name], checks)
    assert sandbox.passes("def f(x): return 2 * x", checks)


@pytest.mark.parametrize(
    ("candidate", "checks"),
    [
        ("def f(a):\n    a.append(3)\n    return tuple(a)", "x = [1]\nassert f(x) == (1, 3) and x == [1, 3]"),
        ("def f(d):\n    d['x'] = {1}", "x = {}\nassert f(x) is None and x == {'x': {1}}"),
        ("def f(): raise ValueError('no')",
         "try:\n    f()\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse: assert 0"),
        ("class P:\n    def __init__(s, a): s.a = a\ndef f(ps): return sum(p.a for p in ps)",
         "assert f([P(1), P(2)]) == 3"),
        ("from __future__ import annotations\ndef f(a: X): return a", "assert f(1) == 1"),
        ("def f(): return 10 ** 5000, float('inf'), 1j, b'x', range(3), None, True, -7",
         "x = f()\nassert x[:4] == (10 ** 5000, float('inf'), 1j, b'x') and list(x[4]) == [0, 1, 2]\n"
         "assert x[5] is None and x[6] is True and x[7] == -7"),
        ("from collections import *\ndef f(): return Counter('aab'), OrderedDict(a=1), deque([1])",
         "a, b, c = f()\nassert a == {'a': 2, 'b': 1} and b == {'a': 1} and list(c) == [1]"),
        ("def f(): yield from 'ab'", "assert list(f()) == ['a', 'b']"),
        ("N = 3\ndef f(x, *, y=1): return x * y", "assert f(2, y=N) == 6"),
        ("import sys\ninput = sys.stdin.readline\ndef f(): return 1", "assert f() == 1"),
        ("def f(): return 1\nif __name__ == '__main__': f(int(input()))", "assert f() == 1"),
        ("def f(): return 1\nif __name__ == '__main__':\n    import sys; sys.exit(0)", "assert f() == 1"),
        ("class E(ValueError): pass\ndef f(): raise E('a', 2)",
         "try:\n    f()\nexcept ValueError as e:\n    assert e.args == ('a', 2)\nelse: assert 0"),
        ("import json\ndef f(): json.loads('{')", "try:\n    f()\nexcept ValueError: pass\nelse: assert 0"),
        ("def f(): return {}['a']", "try: f()\nexcept KeyError as e: assert e.args == ('a',)\nelse: assert 0"),
        ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 3\n"
         "def f(): return P().x", "assert f() == 3"),
        ("print('noise')\ndef f(): print('more'); return 1", "assert f() == 1"),
        ("def f(*, into): into.append(1)", "x = []\nf(into=x)\nassert x == [1]"),
        ("def f(rows): rows[0].append(9)", "row = [1]\nf([row, [2]])\nassert row == [1, 9]"),
        ("def f(by): by['a'].append(1)", "x = []\nf({'a': x})\nassert x == [1]"),
        ("def f(q): q.rotate(1)", "from collections import deque\nq = deque([1, 2])\nf(q)\nassert q == deque([2, 1])"),
        ("def f(rows): rows.insert(0, [0])", "row = [1]\nrows = [row]\nf(rows)\n"
         "assert rows == [[0], [1]] and row == [1]"),
    ],
)  # fmt: skip
def test_honest_values_pass(sandbox, candidate, checks):
    assert sandbox.passes(candidate, checks)
    assert not sandbox.passes(candidate, f"{checks}\nassert 0")


def test_a_function_named_like_a_builtin_is_the_answers_own(sandbox, tmp_path):
    row = {
        "task_id": 1,
        "text": "Add.",
        "code": "def sum(a, b):\n    return 0",
        "test_list": ["assert sum(10, 15) == 6"],
    }
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(row) + "\n")
    task = load_task(f"mbpp:path={path},seconds=2")
    reference = task.problems("test", 1)[0].reference
    assert task.equivalent("def sum(a, b):\n    return 6", reference)
    assert not task.equivalent("def sum(a, b):\n    return 7", reference)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("1000000007", "1000000008", False), ("999999999999999999", "1000000000000000000", False), ("5", "inf", False),
        ("3.0", "3", True), ("3", "3.0", True), ("0.30000000000000004", "0.3", False), ("0.30", "0.3", True),
        ("1e-3", "0.001", True), ("nan", "nan", True), ("nan", "NaN", False), ("x", "1.0", False), ("1", ".", False),
        ("1  2.0", "1 2", True), ("a  b", "a b", False), ("YES 1.0", "YES 1", False), (" x ", "x", True),
        ("snan", "1", False), ("1\n2", "1 2", False), ("1\n\n2\n", "1\n\n2", True), ("9" * 5000, "9" * 5000, True),
    ],
)  # fmt: skip
def test_printed_lines_are_compared_as_livecodebench_does(left, right, same):
    finished = ProgramResult(0, left, "", timed_out=False, seconds=0.1)
    assert _printed(finished, right) is same


@pytest.mark.parametrize(
    ("returned", "wanted", "same"),
    [
        ("0.1 + 0.2", "0.3", False), ("0.1 + 0.2", "0.30000000000000004", True), ("(1, 2)", "[1, 2]", True),
        ("[(1, 2)]", "[[1, 2]]", False), ("1", "1.0", True), ("True", "true", True), ("None", "null", True),
        ("{'a': [1]}", '{"a": [1]}', True), ("'x'", '"y"', False),
    ],
)  # fmt: skip
def test_returned_values_are_compared_as_livecodebench_does(sandbox, tmp_path, returned, wanted, same):
    path = tmp_path / "none.jsonl"
    path.write_text("")
    test = {"input": "1", "output": wanted, "testtype": "functional"}
    reference = json.dumps({"tests": [test], "function": "f"})
    assert load_task(f"livecodebench:path={path}").verdicts(f"def f(x): return {returned}", reference) == [same]


def test_only_harmless_devices_are_available(sandbox):
    program = (
        "import os\nfor n in ('kvm', 'fuse', 'loop0', 'loop-control', 'vcs1', 'tty', 'zram0', 'vda', 'mem', 'shm'):\n"
        "    try: os.close(os.open('/dev/' + n, os.O_RDONLY)); print(n)\n    except OSError: pass\n"
    )
    assert sandbox.run(program).stdout == ""
    assert sandbox.run("print(len(open('/dev/urandom', 'rb').read(4)))").stdout == "4\n"


def test_folders_of_killed_graders_are_removed(sandbox):
    process = subprocess.Popen(["true"])
    process.wait()
    left = Path(tempfile.gettempdir()) / f"reprieve-program-{process.pid}-x"
    ours = Path(tempfile.gettempdir()) / f"reprieve-program-{os.getpid()}-x"
    for folder in (left, ours):
        folder.mkdir()
    Sandbox(LIMITS)
    assert not left.exists() and ours.exists()
    ours.rmdir()


def test_a_sandbox_that_cannot_start_programs_is_refused(monkeypatch, sandbox):
    monkeypatch.setattr(isolation, "_SYSTEM", ("/etc",))
    with pytest.raises(ReprieveError, match=r"print\(1\), did not run"):
        Sandbox(LIMITS)


def test_without_isolation_programs_need_unsafe(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sandlock", None)
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "MECHANISMS", MECHANISMS)
    with pytest.raises(
        ReprieveError,
        match=r"isolation, which this host lacks.*bwrap.*sandlock.*Install bubblewrap.*\[code\].*unsafe=true",
    ):
        Sandbox()
    (tmp_path / "h.jsonl").write_text(json.dumps(HUMANEVAL) + "\n")
    with pytest.raises(ReprieveError, match="isolation"):
        load_task(f"humaneval:path={tmp_path / 'h.jsonl'}")
    told = Sandbox(ResourceLimits(seconds=1.0), unsafe=True)
    assert told.mechanism == "none"
    assert told.run("print(input())", "x").stdout == "x\n"
    assert told.run("while True: pass").timed_out
    waited = told.run("import time; time.sleep(1.5); print(1)")  # wall time may exceed the limit, as under load
    assert (waited.exit_code, waited.stdout, waited.timed_out) == (0, "1\n", False)
    slept = told.run("import time; time.sleep(60)")
    assert slept.timed_out and slept.exit_code != 0 and 4 <= slept.seconds < 30
    assert told.run("x = bytearray(4 << 30)").exit_code != 0


def test_a_kernel_with_an_old_landlock_is_refused(monkeypatch):
    sandlock = pytest.importorskip("sandlock")
    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: 1)
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "MECHANISMS", MECHANISMS)
    with pytest.raises(ReprieveError, match="Landlock has version 1"):
        module.Sandbox()


@pytest.mark.parametrize("values", [dict(seconds=0), dict(memory_mb=1), dict(disk_mb=0), dict(num_processes=0)])
def test_limits_out_of_range_are_refused(values):
    with pytest.raises(SpecError, match=next(iter(values))):
        ResourceLimits(**values)


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
    """Pack tests as LiveCodeBench packs private ones: a compressed pickle of one string, written by hand here."""
    text = json.dumps(cases).encode()
    content = b"\x80\x04X" + len(text).to_bytes(4, "little") + text + b"\x94."
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.slow
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
    helped = 'def half(x):\n    return x / 2\n\n\ndef double(x):\n    """ Twice. """\n'
    test = "def check(candidate):\n    assert half(candidate(3)) == 3 and candidate(2) == double(2)\n"
    path.write_bytes(
        gzip.compress(json.dumps({**HUMANEVAL, "prompt": helped, "entry_point": "double", "test": test}).encode())
    )
    reference = load_task(f"humaneval:path={path}").problems("test", 1)[0].reference
    assert task.equivalent("    return 2 * x\n", reference) and not task.equivalent("    return x\n", reference)
    assert not task.equivalent("    return 0\n\n\ndef half(x):\n    return 3\n", reference), (
        "the tests' own helper counts"
    )
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
def test_broken_program_files_are_refused_with_the_line(sandbox, tmp_path, row, message):
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


def test_processor_time_counts_over_all_processes():
    program = "import os\nfor _ in range(3):\n    if not os.fork():\n        while True: pass\nos.wait()"
    finished = Sandbox(dataclasses.replace(LIMITS, seconds=2.0)).run(program)
    assert finished.timed_out and finished.exit_code != 0
