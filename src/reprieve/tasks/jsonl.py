"""Files of one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError
from reprieve.files import parse_json, read_file

_LARGEST = 4 << 30  # bytes


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file, plain or gzipped, one a line; empty lines are passed over.

    Raises:
        ReprieveError: the file cannot be read, or a line is no JSON object; names both.
    """
    try:
        content = read_file(path, "the file", most=_LARGEST)
        lines = content.decode("utf-8-sig").split("\n")  # a string may hold other line separators
    except UnicodeDecodeError as error:
        raise ReprieveError(f"{str(path)!r} must be UTF-8: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ReprieveError(f"{path}, line {number}: holds half of a surrogate pair, which is no text") from None
        except ValueError as error:
            raise ReprieveError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ReprieveError(f"{path}, line {number}: must be an object, got {type(row).__name__}")
        rows.append((number, row))
    return rows
