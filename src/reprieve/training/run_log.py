"""What a long training says of itself on the way: a line of JSON a step, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from reprieve.files import replace_file, whole_lines


class RunLog:
    """Scalars by step in `metrics.jsonl` and, for TensorBoard, in `events/`.

    Args:
        folder: of the run.
        first_step: where a resumed run goes on; what was logged of later steps is dropped.
    """

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in whole_lines(self.path) if json.loads(line)["step"] < first_step]
        replace_file(self.path, "".join(f"{line}\n" for line in kept))
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "events"), purge_step=first_step)

    def log(self, step: int, kind: str, values: dict[str, float]) -> None:
        """One step's numbers; `kind` names what they are of (`train`, `validation`)."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
