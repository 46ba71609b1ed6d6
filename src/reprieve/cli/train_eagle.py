"""`reprieve train eagle`: a drafting head from the target's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reprieve.cli import options as o
from reprieve.errors import import_extra, require_range


def command(
    target: o.Target = o.BUNDLED,
    task: o.TaskName = "arithmetic",
    split: Annotated[str | None, typer.Option(help="Split the prompts come from; train if there is one.")] = None,
    limit: Annotated[int, typer.Option(help="Number of prompts.")] = 4000,
    offset: o.Offset = 0,
    layers: Annotated[
        str | None, typer.Option(help="Target layers it reads, low to high; 2, half and all but 3 when left out.")
    ] = None,
    draft_vocab_size: Annotated[int, typer.Option(help="Most frequent tokens, which alone it drafts.")] = 32_000,
    intermediate_size: Annotated[int | None, typer.Option(help="Of its layer; the target's when left out.")] = None,
    steps: Annotated[int, typer.Option(help="Unrolled steps of training-time test.")] = 5,
    step_decay: Annotated[float, typer.Option(help="Weight of each further step over the one before.")] = 0.9,
    passes: Annotated[int, typer.Option(help="Over the answers.")] = 3,
    tokens_per_update: Annotated[int, typer.Option(help="Most tokens in one update.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 1e-3,
    held_out: Annotated[float, typer.Option(help="Share of the answers left out and measured on.")] = 0.05,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path, typer.Option(help="Folder for answers, checkpoint and head.")] = Path("runs/eagle3"),
) -> int:
    """Train an EAGLE-3 head; run it again to resume."""
    from reprieve.settings import SamplingParams
    from reprieve.training.eagle3 import EagleTraining, train_eagle3
    from reprieve.training.own_text import own_text_path, write_own_texts

    settings = EagleTraining(
        layers=() if layers is None else tuple(o.parse_numbers(layers, "--layers", int)),
        draft_vocab_size=draft_vocab_size,
        intermediate_size=intermediate_size,
        num_steps=steps,
        step_decay=step_decay,
        num_passes=passes,
        tokens_per_update=tokens_per_update,
        learning_rate=learning_rate,
        seed=seed,
    )
    o.require_problems(limit, offset)
    import_extra("speculators", "eagle")
    pair, loaded = o.load_pair_and_task(target, None, dtype, device, task)
    settings.layers_of(pair.target.config.get_text_config().num_hidden_layers)
    require_range("held_out", held_out, 0.0, 0.9, low_open=True)
    claim_folder(out)
    claim_folder(out / "head", "eagle3")
    split = o.split_of(loaded, split, "train")
    params = SamplingParams(max_new_tokens=loaded.max_new_tokens, temperature=1.0, seed=seed)
    path = own_text_path(out, pair, f"{task} {split} {offset}", params, mixed=True)
    problems = loaded.problems(split, limit, offset=offset)
    try:
        with o.progress_bar("answers") as bar:
            texts = write_own_texts(path, pair, problems, params=params, mixed=True, progress=o.reporter(bar))
        with o.progress_bar("updates") as bar:
            reached = train_eagle3(
                pair, texts, out, settings=settings, held_out=held_out, progress=o.reporter(bar, "updates")
            )
    except KeyboardInterrupt:
        o.console(stderr=True).print(f"interrupted: what is done is kept in {out}; run again to go on")
        return 130
    agreed = ", ".join(f"{share:.1%}" for share in reached["accuracy"])
    o.console().print(
        f"{reached['num_texts']} answers in {reached['seconds']} s; on {reached['num_held_out']} held-out answers head "
        f"and target place the same token first, step by step while they agree: {agreed}\n"
        f"head: {out / 'head'}   use it: reprieve bench --drafter eagle3:path={out / 'head'}",
        soft_wrap=True,
        markup=False,
    )
    return 0
