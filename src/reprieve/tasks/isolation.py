"""Ways to isolate a program: bubblewrap where it works, else the `sandlock` library."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_SYSTEM = ("/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix)
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
FOLDER = "/program"  # of a program in bubblewrap; not /tmp, which hostile programs name


class Unisolated:
    """No isolation: resource and time limits only."""

    name = "none"
    needs_folder = True  # on the host's disk
    own_files = False  # whether a program can change modes and times of its own files only
    cleans_up = False  # whether it ends all processes of the program on SIGTERM, as well as at its end

    def command(self, program: list[str], *, folder: str, disk_bytes: int, num_processes: int) -> list[str]:
        """Return the command that runs `program`, itself a command, isolated."""
        return program


class Bubblewrap(Unisolated):
    """Separate namespaces for each program, with the `bwrap` command: the kernel ends all processes with the first.

    Files are on an in-memory file system of limited size that is removed with the program.
    """

    name = "bubblewrap"
    needs_folder = False
    own_files = True

    def why_not(self) -> str | None:
        """Return why it is not installed; None where it is."""
        return None if shutil.which("bwrap") else "the bwrap command is missing"

    def command(self, program: list[str], *, folder: str, disk_bytes: int, num_processes: int) -> list[str]:
        readable = [word for path in _SYSTEM for word in ("--ro-bind-try", path, path)]
        devices = [word for path in _DEVICES for word in ("--dev-bind-try", path, path)]
        return [
            *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
            *("--cap-drop", "ALL", "--clearenv"),
            *(word for name, value in environment(FOLDER).items() for word in ("--setenv", name, value)),
            *(*readable, "--symlink", "usr/bin", "/bin", *devices),
            *("--size", str(disk_bytes), "--tmpfs", FOLDER, "--remount-ro", "/", "--chdir", FOLDER),
            *("--", *program),
        ]


class Sandlock(Unisolated):
    """Landlock and seccomp by the `sandlock` library: Linux 6.12 or newer, no privileges, works inside containers."""

    name = "sandlock"
    cleans_up = True

    def why_not(self) -> str | None:
        """Return why the library cannot work here; None where it can."""
        try:
            import sandlock
        except ImportError as error:
            return f"the sandlock package is missing ({error})"
        except OSError as error:
            return f"sandlock cannot be loaded ({error})"
        have, need = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        return f"the kernel's Landlock has version {have}, {need} is needed" if have < need else None

    def command(self, program: list[str], *, folder: str, disk_bytes: int, num_processes: int) -> list[str]:
        settings: dict[str, Any] = {
            "fs_readable": [path for path in (*_SYSTEM, *_DEVICES) if os.path.exists(path)],
            "fs_writable": [folder, os.devnull],
            "cwd": folder,
            "max_processes": num_processes,
            "clean_env": True,
            "env": environment(folder),
            "no_coredump": True,
        }
        path = [entry for entry in sys.path if entry]  # without the current folder
        job = {"path": path, "settings": settings, "command": program}
        return [sys.executable, "-I", "-c", _SUPERVISOR.read_text(encoding="utf-8"), json.dumps(job)]


MECHANISMS = (Bubblewrap(), Sandlock())  # the better ones first


def environment(folder: str) -> dict[str, str]:
    """Return the environment of a program; keys and secrets are not in it."""
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
