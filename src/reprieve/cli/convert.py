"""`reprieve convert eagle3`: a drafting head in SafeAILab's layout into the speculators format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from reprieve.cli import options as o


def eagle3(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub id of a SafeAILab checkpoint.")],
    target: Annotated[str, typer.Option(help="The model it drafts for: hub id or folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the head.")],
    layers: Annotated[str | None, typer.Option(help="Target layers it reads; 2, half and all but 3.")] = None,
    norm_before_residual: Annotated[bool, typer.Option(help="The head was trained with the norm first.")] = False,
) -> int:
    """Convert a SafeAILab EAGLE-3 checkpoint."""
    from reprieve.heads.files import find_head
    from reprieve.models.eagle3_layouts import convert_safeailab

    chosen = () if layers is None else tuple(o.parse_numbers(layers, "--layers", int))
    config = convert_safeailab(
        find_head(checkpoint), out, target_name=target, layers=chosen, norm_before_residual=norm_before_residual
    )
    o.console().print(
        f"head: {out} ({config.draft_vocab_size} draft tokens of {config.layer.vocab_size})   use it: reprieve bench "
        f"--target {target} --drafter eagle3:path={out}",
        soft_wrap=True,
        markup=False,
    )
    return 0


COMMANDS: dict[str, Any] = {"eagle3": eagle3}
