"""The files of a label store: Parquet shards that know their own digest, and a journal of which there are.

A shard's name ends in the digest of its bytes, so that a flipped bit is seen; its pages have checksums of their own.
The journal is appended to after a shard is in its place: what it names must be there, until it says that it was folded
away. Stores made before version 1.0 have neither; they are read as they are.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, import_extra
from reprieve.files import parse_json, read_file, replace_file
from reprieve.heads.binding import digest

_JOURNAL = "journal.jsonl"
_NAMED = re.compile(r"-([0-9a-f]{16})\.parquet$")


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
        return sorted(path.name for path in self.folder.glob("*.parquet"))

    def write(self, table: Any, prefix: str) -> str:
        """Put a shard in its place; it outlives the process when this returns its name."""
        parquet = import_extra("pyarrow.parquet", "labels")
        content = io.BytesIO()
        parquet.write_table(table, content, compression="zstd", write_page_checksum=True)
        data = content.getvalue()
        name = f"{prefix}-{digest(data)}.parquet"
        replace_file(self.folder / name, data)
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
        try:
            data = read_file(path, "label store's shard")
        except ReprieveError:
            if not path.exists():
                raise FileNotFoundError(name) from None
            raise
        named = _NAMED.search(name)
        if named and digest(data) != named[1]:
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
        gone = {name for name in self._expected() if not (self.folder / name).exists()}
        if gone and (gone := gone & self._expected()):  # another worker may have folded them since
            raise ReprieveError(
                f"label store {str(self.folder.parent)!r} has lost {len(gone)} of its shards, such as "
                f"{min(gone)}: put them back, or delete {_JOURNAL} to go on without"
            )

    def _expected(self) -> set[str]:
        """What the journal says is there."""
        known: set[str] = set()
        for entry in self._entries():
            known |= set(entry.get("add", ()))
            known -= set(entry.get("remove", ()))
        return known

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
