"""`reprieve demo`: the main job on the bundled pair."""

from __future__ import annotations

from pathlib import Path

from reprieve.cli import generate
from reprieve.cli import options as o
from reprieve.cli.compare import compare

ARMS = (
    "judge:path=reprieve/arithmetic-judge",
    "top_k:k=2",
    "margin:delta=3",
    "typical",
    "fuzzy:threshold=0.6",
    "fly:theta=0.1",
    "math_symbols",
)
QUESTION = "Anna has 23 apples. She buys 18 more apples. She gives away 9 apples. How many apples does Anna have now?"


def command(
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    limit: o.Limit = 100,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = None,
    out: o.Out = Path("runs/demo"),
) -> int:
    """Compare a trained head and six training-free rules with lossless and target-only on generated word problems."""
    if target == o.BUNDLED:
        # So small a pair gains next to nothing from a second thread, and loses much where the other core is busy.
        import torch

        torch.set_num_threads(1)
    for rule in ("lossless", "judge:path=reprieve/arithmetic-judge"):
        heading = o.console()
        heading.print(f"\n[bold]{rule}[/bold]  {QUESTION}", soft_wrap=True)
        generate.command(QUESTION, rule=rule, target=target, draft=draft, dtype=dtype, device=device)
        heading.print("plain: the target's token; green: drafted, matched; yellow: drafted, rescued\n", soft_wrap=True)
    from reprieve.evaluation.arms import make_arms

    return compare(
        make_arms(ARMS, [16]),
        target=target,
        draft=draft,
        drafter="draft",
        dtype=dtype,
        device=device,
        task="arithmetic",
        split="test",
        limit=limit,
        seed=seed,
        sampling=o.sampling_options(0.0, 1.0, 0),
        out=out,
    )
