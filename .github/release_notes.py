"""Print a version's section of CHANGELOG.md: the text of its release."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def notes_of(changelog: str, version: str) -> str:
    """Return the section of a version without its heading.

    Raises:
        SystemExit: the changelog has no such section, or nothing in it.
    """
    sections = re.split(r"^## (\S+).*\n", changelog, flags=re.M)
    notes = dict(zip(sections[1::2], sections[2::2], strict=True)).get(version, "").strip()
    if not notes:
        raise SystemExit(f"CHANGELOG.md must have a section for {version}; it has {', '.join(sections[1::2])}")
    return notes


if __name__ == "__main__":
    print(notes_of((Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8"), sys.argv[1]))
