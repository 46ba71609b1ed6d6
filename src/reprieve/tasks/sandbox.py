"""Runs generated programs in isolation, with resource and time limits.

`isolation` has the mechanisms: bubblewrap, else sandlock. If neither works, nothing runs unless `unsafe` is set:
programs then have limits, but also access to the network and to the user's files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from reprieve.errors import ReprieveError, install_command, require_range
from reprieve.files import is_running
from reprieve.tasks.isolation import FOLDER, MECHANISMS, Unisolated, environment
from reprieve.tasks.usage import cpu_seconds, descendants, disk_bytes, memory_bytes

_KILOBYTE, _MEGABYTE = 1 << 10, 1 << 20
_FOLDERS = "reprieve-program-"
_IN_MEMORY = "/dev/shm"
_RUNNER = Path(__file__).with_name("program_runner.py")
_WATCH_S = 0.02  # between checks of a program's resource usage
_PROBE_S = 60.0  # for the first programs, on a busy machine
_GRACE_S = 5.0  # to end a program in
_NOT_STARTED = (125, 126, 127)  # exit statuses of what should have started a program, or of the program itself
_WALL = 4  # wall-clock limit as a multiple of the CPU limit: a program may wait for a core, or sleep
_MOST_THREADS = 32  # of each process, on average
_Processes = dict[int, int]  # threads of each, by id; 0 for the one that was started


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of one run of a program.

    Args:
        seconds: CPU seconds of all its processes together; the wall-clock limit is four times as long.
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
    """Result of a program. Output is the text that it wrote, truncated if it was too long."""

    exit_code: int  # negative, or above 128: killed, by a limit or a signal
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

    def __init__(self, limits: ResourceLimits | None = None, *, unsafe: bool = False) -> None:
        self.limits = limits or ResourceLimits()
        _sweep()
        self._mechanism = Unisolated()
        reasons = []
        for mechanism in MECHANISMS:
            why_not = mechanism.why_not() or self._why_not(mechanism)
            if why_not is None:
                self._mechanism = mechanism
                break
            reasons.append(f"{mechanism.name}: {why_not}")
        if type(self._mechanism) is Unisolated and not unsafe:
            raise ReprieveError(
                f"generated code needs isolation, which this host lacks ({'; '.join(reasons)}). Install bubblewrap, or "
                f"use Linux 6.12 or newer with {install_command('code')}, or accept that the code can do what you "
                "can: unsafe=true in the task"
            )

    @property
    def mechanism(self) -> str:
        """Mechanism that isolates programs on this host: "bubblewrap", "sandlock", or "none"."""
        return self._mechanism.name

    def run(self, program: str, stdin: str = "") -> ProgramResult:
        """Run a program to its end, or to a limit; all its processes are gone afterwards, and all its files."""
        return self._run({"program": program, "stdin": stdin}, grade=False)

    def passes(self, candidate: str, checks: str, setup: str = "") -> bool:
        """Return whether `checks`, run on the results of a candidate's functions, reach their end.

        The candidate runs in a separate process and sends back plain values. The checks, and the random token that must
        be printed at the end, are in another process that shares nothing with it.

        Args:
            candidate: a program that defines what the checks call.
            checks: asserts. Names that neither they nor `setup` define are the candidate's.
            setup: what the checks rely on: imports and helpers.
        """
        token = secrets.token_hex(16)
        finished = self._run({"candidate": candidate, "checks": checks, "setup": setup, "token": token}, grade=True)
        return finished.exit_code == 0 and finished.stdout.rstrip().endswith(token)

    def _run(self, job: dict[str, str], *, grade: bool) -> ProgramResult:
        """Run a job, twice if the isolation itself failed.

        Raises:
            ReprieveError: the isolation failed twice, and does not work for other programs either.
        """
        content = json.dumps(job).encode()
        for _ in range(2):
            finished, failed = self._run_once(self._mechanism, content, self.limits, grade=grade)
            if not failed:
                return finished
        if why_not := self._why_not(self._mechanism):
            raise ReprieveError(f"programs can no longer be isolated by {self._mechanism.name}: {why_not}")
        return finished

    def _why_not(self, mechanism: Unisolated) -> str | None:
        """Return the reason why a mechanism does not isolate here, found by trying it; None if it does."""
        limits = replace(self.limits, seconds=max(self.limits.seconds, _PROBE_S))
        for program, wanted in (("print(1)", "1"), ("open('/var/tmp/reprieve-probe', 'w')", None)):
            try:
                job = json.dumps({"program": program, "stdin": ""}).encode()
                finished, _ = self._run_once(mechanism, job, limits, grade=False)
            except OSError as error:
                return f"a first program could not be started ({error})"
            if wanted is None:
                return None if finished.exit_code == 1 else "a program was not stopped from writing"
            if finished.exit_code != 0 or finished.stdout.strip() != wanted:
                said = (finished.stderr.strip().splitlines() or [f"exit status {finished.exit_code}"])[-1]
                return f"a first program, {program}, did not run ({said})"
        return None

    def _run_once(
        self, mechanism: Unisolated, job: bytes, limits: ResourceLimits, *, grade: bool
    ) -> tuple[ProgramResult, bool]:
        """Run a job; return its result, and whether the isolation itself may have failed."""
        disk = limits.disk_mb * _MEGABYTE + len(job)  # the program's text and input are files, too
        with _folder(disk) if mechanism.needs_folder else contextlib.nullcontext() as folder, _output() as (out, err):
            program = _program(limits, disk, own_files=mechanism.own_files, grade=grade)
            started = time.monotonic()
            process = subprocess.Popen(
                mechanism.command(program, folder=str(folder), disk_bytes=disk, num_processes=limits.num_processes),
                cwd=folder or "/",
                env=environment(str(folder)),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C goes to this process only
            )
            try:
                within = _wait(process, job, limits, lambda found: _is_within(found, mechanism, limits, folder, disk))
            finally:
                _end(process, mechanism)
            if folder and within:
                within = disk_bytes(folder, disk) <= disk
            seconds = time.monotonic() - started
            stdout, stderr = (_read(file, limits.disk_mb * _MEGABYTE) for file in (out, err))
            code = int(process.returncode) if within else -int(signal.SIGKILL)
            result = ProgramResult(code, stdout, stderr, timed_out=within is None, seconds=seconds)
            failed = bool(within) and (code < 0 or code in _NOT_STARTED or stderr.startswith("bwrap: "))
            return result, failed and type(mechanism) is not Unisolated


def _wait(
    process: subprocess.Popen[bytes], job: bytes, limits: ResourceLimits, is_within: Callable[[_Processes], bool]
) -> bool | None:
    """Send the job; return whether the program ended within the limits, or None if it ran out of time."""
    deadline = time.monotonic() + _WALL * limits.seconds
    given: bytes | None = job
    while True:
        try:
            process.communicate(given, timeout=_WATCH_S)
        except subprocess.TimeoutExpired:
            given = None  # the rest of it is sent on
        else:
            return True
        found = {process.pid: 0, **descendants(process.pid)}
        if time.monotonic() >= deadline or cpu_seconds(list(found)) >= limits.seconds:
            return None
        if not is_within(found):
            return False


def _is_within(
    found: _Processes, mechanism: Unisolated, limits: ResourceLimits, folder: Path | None, disk: int
) -> bool:
    """Return whether all of a program's processes together keep within the limits now."""
    programs = list(found)[0 if type(mechanism) is Unisolated else 2 :]  # the first two are the isolation's own
    if len(programs) > limits.num_processes or sum(found.values()) > _MOST_THREADS * limits.num_processes:
        return False
    in_memory = 0
    if folder is None:  # a file system in memory, which the kernel bounds, but not its number of files
        with contextlib.suppress(OSError, IndexError):
            system = os.statvfs(f"/proc/{programs[0]}/root{FOLDER}")
            in_memory = (system.f_blocks - system.f_bfree) * system.f_frsize
            if (system.f_files - system.f_ffree) * _KILOBYTE > disk:
                return False
    elif (in_memory := disk_bytes(folder, disk)) > disk:
        return False
    memory = limits.memory_mb * _MEGABYTE - in_memory
    return memory_bytes(programs, memory) <= memory


def _program(limits: ResourceLimits, disk: int, *, own_files: bool, grade: bool) -> list[str]:
    cpu_s = math.ceil(limits.seconds) + 1  # of each process: more than all together may take
    numbers = grade, own_files, cpu_s, disk, limits.memory_mb * _MEGABYTE
    runner = _RUNNER.read_text(encoding="utf-8")
    return [sys.executable, "-I", "-c", runner, *(str(int(number)) for number in numbers)]


def _end(process: subprocess.Popen[bytes], mechanism: Unisolated) -> None:
    """End a program and all that it started."""
    if mechanism.cleans_up:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _output() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Two files in memory, without names."""
    with os.fdopen(os.memfd_create("stdout"), "w+b") as out, os.fdopen(os.memfd_create("stderr"), "w+b") as err:
        yield out, err


def _read(file: IO[bytes], length: int) -> str:
    file.seek(0)
    return file.read(length).decode(errors="replace")


@contextlib.contextmanager
def _folder(disk: int) -> Iterator[Path]:
    """A folder that is removed, in memory where there is room: thousands of files take seconds on some disks."""
    writable = os.access(_IN_MEMORY, os.W_OK)
    parent = _IN_MEMORY if writable and shutil.disk_usage(_IN_MEMORY).free > 4 * disk else None
    folder = tempfile.mkdtemp(prefix=f"{_FOLDERS}{os.getpid()}-", dir=parent)  # named after the process that removes it
    try:
        yield Path(folder)
    finally:
        _remove(folder)


def _sweep() -> None:
    """Remove the folders that killed processes left behind."""
    for parent in (tempfile.gettempdir(), _IN_MEMORY):
        for path in Path(parent).glob(f"{_FOLDERS}*-*"):
            number = path.name.removeprefix(_FOLDERS).partition("-")[0]
            if number.isdigit() and not is_running(int(number)):
                _remove(str(path))


def _remove(folder: str) -> None:
    """Remove a folder however deep it is, and whatever modes its folders have."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(folder):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)
