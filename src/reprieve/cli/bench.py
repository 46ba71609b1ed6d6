"""`reprieve bench`: arms side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reprieve.cli import options as o
from reprieve.cli.compare import compare


def command(
    arm: Annotated[
        list[str],
        typer.Option(
            help="A rule, such as top_k:k=4 or judge:path=heads/j@K=24; lossless_rerun; direct:top_k:k=4. Repeatable."
        ),
    ] = [],  # noqa: B006
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[int, typer.Option(help="K: drafted tokens a round.")] = 16,
    task: o.TaskName = "arithmetic",
    split: o.Split = "test",
    limit: o.Limit = 200,
    offset: o.Offset = 0,
    trials: o.Trials = 1,
    chat_template: o.ChatTemplate = False,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    draft_temperature: o.DraftTemperature = None,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: o.Out = Path("runs/bench"),
) -> int:
    """Compare rules on a task; target-only, draft-only and lossless are always among them."""
    from reprieve.evaluation.arms import make_arms

    return compare(
        make_arms(arm, [num_draft_tokens]),
        target=target,
        draft=draft,
        drafter=drafter,
        dtype=dtype,
        device=device,
        task=task,
        split=split,
        limit=limit,
        seed=seed,
        sampling=o.sampling_options(temperature, top_p, top_k, draft_temperature),
        out=out,
        offset=offset,
        trials=trials,
        chat_template=chat_template,
    )
