"""`reprieve convert eagle3`: a drafting head in SafeAILab's layout into the speculators format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import Command


@dataclass(frozen=True)
class ConvertEagle3(Command):
    """Convert a SafeAILab EAGLE-3 checkpoint.

    Args:
        checkpoint: Folder or hub id of a SafeAILab checkpoint.
        target: The model it drafts for: hub id or folder.
        out: Folder for the head.
        layers: Target layers it reads. Default: 2, half and all but 3.
        norm_before_residual: The head was trained with the norm first.
    """

    verb = "convert eagle3"

    checkpoint: str = field(metadata={"positional": True})
    target: str
    out: Path
    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False

    def run(self) -> int:
        from reprieve.heads.files import find_head
        from reprieve.models.eagle3_layouts import convert_safeailab

        config = convert_safeailab(
            find_head(self.checkpoint, also=("*.index.json", "model-*.safetensors", "pytorch_model*.bin")),
            self.out,
            target_name=self.target,
            layers=self.layers,
            norm_before_residual=self.norm_before_residual,
        )
        screen.say(
            f"head: {self.out} ({config.draft_vocab_size} draft tokens of {config.layer.vocab_size})   use it: "
            f"reprieve bench --target {self.target} --drafter eagle3:path={self.out}"
        )
        return 0
