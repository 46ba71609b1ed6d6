"""Files that runs write: whole or not at all, and logs that survive a kill."""

from __future__ import annotations

import os
from pathlib import Path

from reprieve.errors import ReprieveError


def replace_file(path: Path, content: bytes | str) -> None:
    """Write to a temporary name beside `path` and rename: readers see the old file or the new one, never half.

    Raises:
        ReprieveError: the file cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        raise ReprieveError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that is appended to; none without a file, and one cut off by a kill is dropped for good."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) != len(raw):
        replace_file(path, whole)
    return whole.decode().splitlines()
