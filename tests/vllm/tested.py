"""The table of tested versions, written by the test run: a row for each vLLM and model runner, with its test files.

`RECORD_TESTED=1` (as `make test-vllm` sets it) writes; rows without files come from earlier runs. Releases
newer than the installed CPU build ran on its kernels (overlay.py).
"""

import datetime
import json
import tempfile
from pathlib import Path

from filelock import FileLock

from reprieve.vllm_plugin.configuration import TESTED


def record(version, runner, file, num_passed, table=TESTED):
    """Note that a file's tests passed; several test runs may write at once."""
    with FileLock(Path(tempfile.gettempdir()) / "reprieve-tested.lock"):
        rows = json.loads(table.read_text(encoding="utf-8"))
        row = next((row for row in rows if (row["vllm"], row["runner"]) == (version, runner)), None)
        if row is None:
            row = {"vllm": version, "runner": runner, "files": {}}
            rows.append(row)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        row["files"] = dict(sorted({**row["files"], file: {"passed": num_passed, "date": today}}.items()))
        rows.sort(key=lambda row: (row["vllm"], row["runner"]))
        table.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
