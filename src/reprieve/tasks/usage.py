"""Processor time, memory, processes and disk that a program uses, counted over all its processes. Linux only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_KILOBYTE = 1 << 10


def descendants(root: int) -> dict[int, int]:
    """Return the number of threads of each descendant of `root`, parents before children."""
    found: dict[int, int] = {}
    level = [root]
    while level:
        children: list[int] = []
        for process in level:
            with contextlib.suppress(OSError):
                tasks = os.listdir(f"/proc/{process}/task")
                found[process] = len(tasks)
                for task in tasks:
                    children += map(int, _text(f"/proc/{process}/task/{task}/children").split())
        level = [child for child in children if child not in found]
    found.pop(root, None)
    return found


def cpu_seconds(processes: list[int]) -> float:
    """Return the processor time of processes together, that of children which have ended included."""
    ticks = 0
    for process in processes:
        fields = _text(f"/proc/{process}/stat").rpartition(")")[2].split()  # after the name, which may hold anything
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(processes: list[int], enough: int) -> int:
    """Return the total memory of processes in bytes, without file-backed pages; shared pages count once.

    Args:
        processes: process ids.
        enough: bytes up to which a faster estimate is returned, which counts shared pages several times.
    """
    rough = sum(_kilobytes(f"/proc/{process}/status", ("RssAnon:", "RssShmem:")) or 0 for process in processes)
    if rough * _KILOBYTE <= enough:
        return rough * _KILOBYTE
    total = 0
    for process in processes:
        exact = _kilobytes(f"/proc/{process}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
        if exact is None:  # unreadable for processes without core dumps, unless root
            exact = _kilobytes(f"/proc/{process}/status", ("RssAnon:", "RssShmem:")) or 0
        total += exact
    return total * _KILOBYTE


def disk_bytes(folder: str | Path, enough: int) -> int:
    """Return the disk usage of a folder in bytes, or some number above `enough`; an empty file counts as 1 KiB."""
    total, folders = 0, [str(folder)]
    while folders and total <= enough:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    total += max(_KILOBYTE, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            pass  # removed meanwhile
        except OSError:  # too deep for a path, or closed to readers: what it holds cannot be counted
            return enough + 1
    return total


def _kilobytes(path: str, names: tuple[str, ...]) -> int | None:
    """Sum of these fields of a file in /proc; None where it cannot be read."""
    text = _text(path)
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(names)) if text else None


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # ended meanwhile
        return ""
