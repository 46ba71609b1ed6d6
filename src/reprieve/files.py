"""File access of runs: atomic writes, logs that survive a kill, checked reads, and folder locks."""

from __future__ import annotations

import gzip
import json
import os
import socket
import stat
import threading
import zlib
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from reprieve.errors import ReprieveError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LARGEST = 1 << 30  # bytes
_HOST = socket.gethostname()


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically, by renaming a temporary file in its folder: readers never see a partial file.

    Raises:
        ReprieveError: the file cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.{_HOST}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        if path.exists() and not path.is_file():  # such as a device, which the rename would replace
            raise ReprieveError(f"{str(path)!r} cannot be written: it is no plain file")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        raise ReprieveError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes of this machine left in a folder."""
    for path in folder.glob(f".*.{_HOST}.*.tmp"):
        number = path.name.split(".")[-2].partition("-")[0]
        if number.isdigit() and not is_running(int(number)):
            path.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Return True if a process of this machine with this number is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process, or not a process id: assume that it runs
        pass
    return True


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or contains a number with thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read_file(path: str | Path, what: str, *, most: int = _LARGEST) -> bytes:
    """Return the content of a regular file; `.gz` files are decompressed.

    Args:
        what: description of the file, for error messages.
        most: maximum size in bytes, after decompression.

    Raises:
        ReprieveError: the file is missing, too large, damaged, or not a regular file (a pipe might never end).
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no plain file")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"it is larger than {most} bytes")
        return content
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReprieveError(f"{what} {str(path)!r} cannot be read: {reason}") from None


def read_json(path: str | Path, what: str, *, most: int = _LARGEST) -> Any:
    """Read a JSON file; all JSON files are read by this function.

    Raises:
        ReprieveError: see `read_file`; it is not UTF-8, or no JSON (`parse_json`).
    """
    content = read_file(path, what, most=most)
    try:
        return parse_json(content.decode("utf-8-sig"))
    except ValueError as error:
        raise ReprieveError(f"{what} {str(path)!r} cannot be read: {error}") from None


def whole_lines(path: Path, *, repair: bool = False) -> list[str]:
    """Return the complete lines of a log, [] if the file is missing. A last line cut off by a kill is dropped.

    Args:
        repair: also remove that line from the file, so that it can be appended to. Only for the file's single writer.

    Raises:
        ReprieveError: the file cannot be read, or is not UTF-8.
    """
    if not path.exists():
        return []
    raw = read_file(path, "the file")
    whole = raw[: raw.rfind(b"\n") + 1]
    if repair and len(whole) != len(raw):
        replace_file(path, whole)
    try:
        return whole.decode().split("\n")[:-1]  # a text may hold other line separators
    except UnicodeDecodeError as error:
        raise ReprieveError(f"{str(path)!r} must be UTF-8: {error}") from None


class FolderLock:
    """Lock on a folder, held until this object is garbage-collected or the process ends.

    Raises:
        ReprieveError: another process holds the folder, or its `.lock` cannot be written or is no plain file.
    """

    _held: ClassVar[WeakValueDictionary[Path, FolderLock]] = WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        path = folder / ".lock"
        if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
            raise ReprieveError(f"{str(path)!r} cannot be written: it is no plain file; remove it")
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ReprieveError(f"{str(path)!r} cannot be written: {error.strerror}; nothing was changed") from None
        if fcntl is None:  # no such locks on this system
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReprieveError(
                f"--out {str(folder)!r} is in use by another run: wait for it, or name another folder"
            ) from None
        except OSError:  # a file system without locks
            pass

    @classmethod
    def of(cls, folder: Path) -> FolderLock:
        """Return the lock of a folder; a lock that this process already holds is reused."""
        key = folder.resolve()
        lock = cls._held.get(key) or cls(folder)
        cls._held[key] = lock
        return lock
