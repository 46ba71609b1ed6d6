"""Generated code runs here and nowhere else: no network, a folder of its own, limits, and an end.

Isolation is the `sandlock` library's (Landlock, seccomp; Linux 6.12 or newer, no root needed). On a host without it
nothing runs, unless one says so: then processes have limits and an end, but the network and the files of the user.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, require_range
from reprieve.files import is_running
from reprieve.tasks.isolation import fork_server
from reprieve.tasks.supervisor import feed

_MEGABYTE = 1 << 20
_FOLDERS = "reprieve-program-"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_READABLE = ("/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix, *(f"/dev/{name}" for name in _DEVICES))
_INSIDE = Path(__file__).with_name("inside.py")
# Landlock guards files' contents, not what is told about them; root's programs could set clocks and others' priorities.
# More is refused by `inside`, which knows what a call is about.
_REFUSED_CALLS = (
    "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
    "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "setpriority", "ioprio_set",
    "clock_settime", "clock_adjtime", "adjtimex", "settimeofday", "syslog", "sethostname", "setdomainname",
    "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_open", "pidfd_getfd", "pidfd_send_signal",
    "process_madvise", "migrate_pages", "move_pages", "io_uring_setup", "userfaultfd", "perf_event_open", "bpf",
    "keyctl", "add_key", "request_key", "quotactl", "acct", "swapon", "swapoff", "reboot", "kexec_load",
    "open_by_handle_at", "name_to_handle_at", "unshare", "setns", "chroot", "fanotify_init",
    "inotify_init", "inotify_init1", "inotify_add_watch", "memfd_create", "memfd_secret",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use.

    Args:
        seconds: wall clock, and processor seconds of each process.
        memory_mb: of all its processes together.
        disk_mb: of all files it writes, and of each.
        num_processes: at once.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 32
    num_processes: int = 16

    def __post_init__(self) -> None:
        require_range("seconds", self.seconds, 0.1, 3600)
        require_range("memory_mb", self.memory_mb, 32, 1 << 20)
        require_range("disk_mb", self.disk_mb, 1, 1 << 20)
        require_range("num_processes", self.num_processes, 1, 1024)


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended. Output is what it wrote before, cut where it was too long."""

    exit_code: int  # negative: killed, by a limit or a signal
    stdout: str
    stderr: str
    timed_out: bool
    seconds: float


class Sandbox:
    """Runs Python programs.

    Args:
        limits: of each run.
        unsafe: run without isolation where the host has none. The program then can read and write what the user can.

    Raises:
        ReprieveError: the host cannot isolate, and `unsafe` is not set.
    """

    def __init__(self, limits: Limits | None = None, *, unsafe: bool = False) -> None:
        self.limits = limits or Limits()
        _sweep()
        self.isolated = self._why_not is None
        if not self.isolated and not unsafe:
            raise ReprieveError(
                f"generated code needs isolation, which this host lacks: {self._why_not}. Use Linux 6.12 or newer with "
                "pip install 'reprieve[code]', or accept that the code can do what you can: unsafe=true in the task"
            )

    def run(self, program: str, stdin: str = "") -> ProgramResult:
        """Run a program to its end, or to a limit; all its processes are gone afterwards, and all its files."""
        return self._run(program, stdin)

    def passes(self, candidate: str, checks: str, setup: str = "") -> bool:
        """Whether `checks`, run on what a candidate's functions give, reach their end.

        The candidate runs in a process of its own and sends back plain values; the checks, and a number drawn for this
        run that must be shown at the end, are in another that it never shared.

        Args:
            candidate: a program that defines what the checks call.
            checks: asserts. Names that neither they nor `setup` define are the candidate's.
            setup: what the checks rely on: imports and helpers.
        """
        token = secrets.token_hex(16)
        job = {"candidate": candidate, "checks": checks, "setup": setup, "token": token}
        finished = self._run("", "", json.dumps(job).encode())
        return finished.exit_code == 0 and finished.stdout.rstrip().endswith(token)

    def _run(self, program: str, stdin: str, job: bytes | None = None) -> ProgramResult:
        with _folder(program, stdin) as folder:
            started = time.monotonic()
            code, timed_out = (self._run_isolated if self.isolated else self._run_limited)(folder, job)
            seconds = time.monotonic() - started
            return ProgramResult(code, self._read(folder / "stdout"), self._read(folder / "stderr"), timed_out, seconds)

    @cached_property
    def _why_not(self) -> str | None:
        """Why programs cannot be isolated here; None where they can. Tried, not guessed."""
        try:
            import sandlock
        except ImportError as error:
            return f"the sandlock package is missing ({error})"
        except OSError as error:
            return f"sandlock cannot be loaded ({error})"
        have, need = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if have < need:
            return f"the kernel's Landlock has version {have}, {need} is needed"
        try:
            with _folder("print(1)", "") as folder:
                code, _ = self._run_isolated(folder)
                said = self._read(folder / "stdout").strip(), self._read(folder / "stderr").strip()
            if code != 0 or said[0] != "1":
                why = said[1].splitlines()[-1] if said[1] else f"exit status {code}"
                return f"a first program, print(1), did not run ({why})"
            with _folder("open('/var/tmp/reprieve-probe', 'w')", "") as folder:
                code, _ = self._run_isolated(folder)
        except Exception as error:  # whatever the kernel refused: then there is no isolation
            return f"a first program could not be started ({error})"
        return None if code == 1 else f"a program was not stopped from writing (exit status {code})"

    def _run_isolated(self, folder: Path, job: bytes | None = None) -> tuple[int, bool]:
        limits = self.limits
        with tempfile.TemporaryDirectory(prefix=_prefix()) as storage:
            settings = {
                "fs_readable": [*(path for path in _READABLE if os.path.exists(path)), str(folder)],
                "workdir": str(folder),  # writes go to the storage, up to the quota, and are then moved here
                "cwd": str(folder),
                "fs_storage": storage,
                "max_disk": f"{limits.disk_mb}M",
                "max_memory": f"{limits.memory_mb}M",
                "max_processes": limits.num_processes,
                "max_open_files": 64,
                "extra_deny_syscalls": _REFUSED_CALLS,
                "clean_env": True,
                "env": _environment(folder),
                "no_coredump": True,
            }
            found = fork_server.run(settings, self._command(0, grade=job is not None), job, limits.seconds)
        return found["code"], found["late"]

    def _run_limited(self, folder: Path, job: bytes | None = None) -> tuple[int, bool]:
        """Limits and an end, no isolation."""
        process = subprocess.Popen(
            self._command(self.limits.memory_mb * _MEGABYTE, grade=job is not None),
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL if job is None else subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if job is not None:
                feed(process.stdin, job, self.limits.seconds)
            return process.wait(self.limits.seconds), False
        except subprocess.TimeoutExpired:
            return -int(signal.SIGKILL), True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _command(self, memory_bytes: int, *, grade: bool) -> list[str]:
        cpu_s = math.ceil(self.limits.seconds) + 1  # beyond the clock, which alone can tell that it was time
        limits = cpu_s, self.limits.disk_mb * _MEGABYTE, memory_bytes
        inside = _INSIDE.read_text(encoding="utf-8")
        return [sys.executable, "-I", "-c", inside, *(str(int(number)) for number in (grade, *limits))]

    def _read(self, path: Path) -> str:
        """A file the program may have replaced by anything: only a plain one is read."""
        try:
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            return ""
        with open(number, "rb") as file:
            return file.read(self.limits.disk_mb * _MEGABYTE).decode(errors="replace")


def _prefix() -> str:
    """Of folders in the temporary folder, which name the process that removes them."""
    return f"{_FOLDERS}{os.getpid()}-"


def _sweep() -> None:
    """Remove what processes left behind that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*-*"):
        number = path.name.removeprefix(_FOLDERS).partition("-")[0]
        if number.isdigit() and not is_running(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _environment(folder: Path) -> dict[str, Any]:
    return {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@contextlib.contextmanager
def _folder(program: str, stdin: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=_prefix()))
    try:
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        (folder / "stdout").touch()
        (folder / "stderr").touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
