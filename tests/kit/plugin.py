"""Installs the package in tests/plugin into a folder: what pip would leave there, without pip."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "plugin"


def install_plugin(folder: Path) -> Path:
    """Its module and its metadata, entry points among them; on `sys.path`, the folder is an installation."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    for module in SOURCE.glob("*.py"):
        shutil.copy(module, folder)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
