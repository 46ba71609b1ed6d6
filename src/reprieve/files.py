"""File access of runs: atomic writes, logs that survive a kill, checked reads and records, and folder locks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import socket
import stat
import threading
import types
import typing
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reprieve.errors import ReprieveError

if TYPE_CHECKING:
    from filelock import FileLock

Record = TypeVar("Record")
_LARGEST = 1 << 30  # bytes
_PIECE = 1 << 24  # bytes in one read
_MOST = 1e15  # of any count or time: sums stay exact
_HOST = socket.gethostname()


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically, by renaming a temporary file in its folder: readers never see a partial file.

    Raises:
        ReprieveError: the file cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.{_HOST}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        if path.exists() and not path.is_file():  # such as a device, which the rename would replace
            raise ReprieveError(f"{str(path)!r} cannot be written: it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise ReprieveError(f"{str(path)!r} cannot be written: {error.strerror}") from None
        raise


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


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse a JSON text.

    Args:
        unique: refuse objects with a key twice, of which JSON takes the last.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, contains a number with thousands of digits, or
            gives a key twice where `unique`.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


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
            raise ValueError("it is not a regular file")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            pieces, size = [], 0
            while size <= most and (piece := file.read(_PIECE)):  # `read(most)` would reserve that much memory
                pieces.append(piece)
                size += len(piece)
        content = b"".join(pieces)
        if len(content) > most:
            raise ValueError(f"it is larger than {most} bytes")
        return content
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReprieveError(f"{what} {str(path)!r} cannot be read: {reason}") from None


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file; all JSON files are read by this function.

    Raises:
        ReprieveError: see `read_file`; it is not UTF-8, not JSON (`parse_json`), or has an object with a key twice.
    """
    content = read_file(path, what)
    try:
        return parse_json(content.decode("utf-8-sig"), unique=True)
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


def append_line(path: Path, values: Mapping[str, Any], kept: str) -> None:
    """Append one record and flush it: a kill after this loses nothing.

    Args:
        kept: the records before it, as the error message calls them.

    Raises:
        ReprieveError: the file cannot be written; names it and what is kept.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, ensure_ascii=False) + "\n")
            file.flush()
    except OSError as error:
        raise ReprieveError(
            f"{str(path)!r} cannot be written: {error.strerror}; {kept} are kept, run again to resume"
        ) from None


def first_difference(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> str | None:
    """Return the first key, in the order of `wanted`, whose values differ; None if the mappings are equal."""
    return next((key for key in [*wanted, *stored] if wanted.get(key) != stored.get(key)), None)


def read_lines(path: Path, what: str, *, repair: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the prefix of an error message and the object of each line. A last line cut off by a kill is dropped.

    Args:
        what: noun for errors, such as "problem record".
        repair: see `whole_lines`.

    Raises:
        ReprieveError: a line is not a JSON object; names file and line.
    """
    for number, line in enumerate(whole_lines(path, repair=repair), start=1):
        where = f"{path}, line {number} is not a valid {what}"
        try:
            values = parse_json(line)
        except ValueError as error:
            raise ReprieveError(f"{where}: {error}") from None
        if not isinstance(values, dict):
            raise ReprieveError(f"{where}: it must be an object, got {type(values).__name__}")
        yield where, values


def read_records(
    path: Path, kind: type[Record], what: str, *, repair: bool = False, signed: bool = False
) -> Iterator[Record]:
    """Yield the record of each line; arguments as `read_lines` and `record_from` have them.

    Raises:
        ReprieveError: a line is not such a record; names file and line.
    """
    for where, values in read_lines(path, what, repair=repair):
        try:
            yield record_from(kind, values, signed=signed)
        except ValueError as error:
            raise ReprieveError(f"{where}: {error}") from None


def record_from(kind: type[Record], values: Mapping[str, Any], *, exact: bool = False, signed: bool = False) -> Record:
    """Build a dataclass from JSON values. Missing fields take their default.

    Args:
        exact: refuse unknown fields, which are ignored otherwise.
        signed: allow negative numbers.

    Raises:
        ValueError: names the field that is missing, unknown, of another type, negative or too large.
    """
    known: dict[str, Any] = {}
    hints = _hints(kind)  # type: ignore[arg-type]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            known[field.name] = converted(field.name, values[field.name], hints[field.name], exact=exact, signed=signed)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{field.name} is missing")
    if exact and (unknown := values.keys() - hints.keys()):
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    return kind(**known)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def converted(name: str, value: Any, hint: Any, *, exact: bool = False, signed: bool = False) -> Any:
    """Return a JSON value as its field's type: a list may become a tuple, and an object a dataclass.

    Raises:
        ValueError: see `record_from`.
    """
    if isinstance(hint, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not types.NoneType]
        if value is None and len(options) < len(typing.get_args(hint)):
            return None
        hint = next((option for option in options if _is_of(value, option)), options[0])
    kind, items = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        _require(name, value, dict)
        return record_from(typing.cast(type, kind), value, exact=exact, signed=signed)
    if kind in (list, tuple):
        _require(name, value, list)
        convert = functools.partial(converted, f"an item of {name}", hint=items[0], exact=exact, signed=signed)
        return kind(map(convert, value))
    if kind in (dict, Mapping):
        _require(name, value, dict)
        convert = functools.partial(converted, f"an item of {name}", hint=items[1], exact=exact, signed=signed)
        return {key: convert(item) for key, item in value.items()}
    _require(name, value, kind)
    if isinstance(value, int | float) and not (-_MOST if signed else 0) <= value < _MOST:
        least = f"{-_MOST:g}" if signed else "0"
        raise ValueError(f"{name} must be {least} or more and below {_MOST:g}, got {value!r:.80}")
    return value


def _is_of(value: Any, hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    return isinstance(kind, type) and isinstance(value, kind)


def _require(name: str, value: Any, kind: type) -> None:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")


def open_folder(folder: Path) -> FileLock:
    """Create a folder that work is written to, and lock it for this process, until the lock is garbage-collected.

    Temporary files that killed processes left there are removed. A process may open the same folder several times.

    Raises:
        ReprieveError: the folder cannot be created, another process holds it, or its `.lock` cannot be written.
    """
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReprieveError(f"--out {str(folder)!r} cannot be created: {error.strerror}") from None
    path = folder / ".lock"
    lock = FileLock(path, is_singleton=True, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ReprieveError(
            f"--out {str(folder)!r} is in use by another run: wait for it, or name another folder"
        ) from None
    except OSError as error:
        raise ReprieveError(f"{str(path)!r} cannot be written: {error.strerror}; nothing was changed") from None
    sweep(folder)
    return lock
