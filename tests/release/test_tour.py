"""The notebook runs from top to bottom."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "examples" / "tour.ipynb"
LABELS = ROOT / "benchmarks" / "labels" / "miniature-autojudge"


def script_of(notebook):
    """Return the notebook's code as one script, on two problems; `!reprieve ...` calls this checkout's command line."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = ["import shlex", "from reprieve.cli.main import main", *cells]
    code, num = re.subn(r"^!reprieve (.*)$", r"assert main(shlex.split(f'\1')) == 0", "\n\n".join(cells), flags=re.M)
    assert num == 2 and code.count('problems("test", 5)') == 1
    return code.replace('problems("test", 5)', 'problems("test", 2)')


def first_labels(folder, num):
    """Put the first problems of the notebook's label store into a folder."""
    folder.mkdir(parents=True)
    shutil.copy(LABELS / "manifest.json", folder)
    with gzip.open(LABELS / "labels.jsonl.gz", "rt", encoding="utf-8") as lines:
        (folder / "labels.jsonl").write_text("".join(itertools.islice(lines, num)), encoding="utf-8")


@pytest.mark.slow
def test_the_notebook_runs_and_its_head_decodes(tmp_path):
    first_labels(tmp_path / "benchmarks" / "labels" / LABELS.name, 100)
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
    solved = re.findall(r"^(.+?) +(\d) of 2 solved +([\d.]+) tokens per round +(\d+) rescued$", done.stdout, flags=re.M)
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
