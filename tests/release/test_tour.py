"""The notebook runs from top to bottom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "examples" / "tour.ipynb"


def script_of(notebook):
    """Return the notebook's code as one script; `!reprieve ...` runs this checkout's command line in a shell."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    command = r"subprocess.run(f'{sys.executable} -m reprieve.cli.main \1', shell=True, check=True)"
    cells = ["import subprocess, sys", *cells]
    return re.sub(r"^!reprieve (.*)$", command, "\n\n".join(cells), flags=re.M)


@pytest.mark.slow
def test_the_notebook_runs_and_its_head_decodes(tmp_path):
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    script = tmp_path / "tour.py"
    script.write_text(script_of(json.loads(TOUR.read_text(encoding="utf-8"))))
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr
    solved = re.findall(r"^(.+?) +(\d) of 5 solved +([\d.]+) tokens per round +(\d+) rescued$", done.stdout, flags=re.M)
    assert [name for name, *_ in solved][-2:] == ["lossless", "the new head"]
    rescued = {name: int(number) for name, _, _, number in solved}
    assert rescued["lossless"] == 0 < rescued["margin:delta=3"]
    assert rescued["the new head"] > 0
    assert (tmp_path / "heads" / "tour" / "model.safetensors").is_file()


def test_the_notebook_has_no_stale_numbers():
    """The notebook is stored without outputs, so none can become outdated."""
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
