"""The files of a label store: Parquet shards that know their own digest, and a journal of which there are.

A shard's name ends in the digest of its bytes, so that a flipped bit is seen; its pages have checksums of their own.
The journal is appended to after a shard is in its place: what it names must be there, until it says that it was folded
away. Stores made before version 0.3 have neither; they are read as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, import_extra
from reprieve.files import parse_json, read_file

_JOURNAL = "journal.jsonl"
_DIGEST = 16  # hexadecimal digits
_NAMED = re.compile(rf"-([0-9a-f]{{{_DIGEST}}})\.parquet$")


class Shards:
    """The shards of one store.

    Args:
        folder: of the store; they lie in `shards` inside.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shards"
        self._journal = folder / _JOURNAL

    def names(self) -> list[str]:
        """Those in place, sorted."""
        return sorted(path.name for path in self.folder.glob("*.parquet") if path.is_file())

    def write(self, table: Any, prefix: str) -> str:
        """Put a shard in its place; it outlives the process when this returns its name."""
        parquet = import_extra("pyarrow.parquet", "labels")
        content = io.BytesIO()
        parquet.write_table(table, content, compression="zstd", write_page_checksum=True)
        data = content.getvalue()
        name = f"{prefix}-{hashlib.sha256(data).hexdigest()[:_DIGEST]}.parquet"
        temporary = self.folder / f".{name}.{socket.gethostname()}.{os.getpid()}.tmp"
        temporary.write_bytes(data)
        os.replace(temporary, self.folder / name)
        self._note(add=[name])
        return name

    def remove(self, names: list[str]) -> None:
        """Take away shards whose rows are in another."""
        self._note(remove=names)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def read(self, name: str, columns: list[str] | None = None) -> Any:
        """A shard's table.

        Raises:
            FileNotFoundError: another worker has folded it away.
            ReprieveError: it cannot be read, or was changed.
        """
        pyarrow, parquet = import_extra("pyarrow", "labels"), import_extra("pyarrow.parquet", "labels")
        path = self.folder / name
        if not path.exists():
            raise FileNotFoundError(name)
        try:
            data = read_file(path, "label store's shard")
        except ReprieveError:
            if not path.exists():
                raise FileNotFoundError(name) from None
            raise
        named = _NAMED.search(name)
        if named and hashlib.sha256(data).hexdigest()[:_DIGEST] != named[1]:
            raise ReprieveError(f"{str(path)!r} was changed after it was written: its labels cannot be trusted")
        try:
            return parquet.read_table(io.BytesIO(data), columns=columns, page_checksum_verification=True)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise ReprieveError(f"label store's shard {str(path)!r} cannot be read: {error}") from None

    def require_all(self) -> None:
        """Refuse a store that lost a shard.

        Raises:
            ReprieveError: names the first that is not in its place.
        """
        known: dict[str, None] = {}
        for entry in self._entries():
            known |= dict.fromkeys(entry.get("add", ()))
            for name in entry.get("remove", ()):
                known.pop(name, None)
        gone = known.keys() - set(self.names())
        # Another worker may have folded them since.
        gone -= {name for entry in self._entries() for name in entry.get("remove", ())}
        if gone:
            raise ReprieveError(
                f"label store {str(self.folder.parent)!r} has lost {len(gone)} of its shards, such as "
                f"{min(gone)}: put them back, or delete {_JOURNAL} to go on without"
            )

    def sweep(self) -> None:
        """Remove what killed workers of this machine left half-written."""
        for path in self.folder.glob(f".*.{socket.gethostname()}.*.tmp"):
            number = path.name.split(".")[-2]
            if number.isdigit() and not _runs(int(number)):
                path.unlink(missing_ok=True)

    def _entries(self) -> Iterator[dict[str, list[str]]]:
        """What the journal says; a line that a kill cut off says nothing, and its shard is taken as it is."""
        for line in self._journal.read_bytes().splitlines() if self._journal.exists() else ():
            with contextlib.suppress(ValueError):
                entry = parse_json(line)
                if isinstance(entry, dict) and all(isinstance(names, list) for names in entry.values()):
                    yield entry

    def _note(self, **entry: list[str]) -> None:
        with self._journal.open("ab", buffering=0) as file:  # one write: lines of several workers do not mix
            file.write(b"\n" + json.dumps(entry).encode() + b"\n")


def _runs(number: int) -> bool:
    """Whether a process is alive."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
