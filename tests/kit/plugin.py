"""Install the package in tests/plugin into a folder, as pip would."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "plugin"


def install_plugin(folder: Path) -> Path:
    """Write the module and its metadata with entry points; on `sys.path`, the folder acts as an installation."""
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
