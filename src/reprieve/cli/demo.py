"""`reprieve demo`: the main job on the bundled pair."""

from __future__ import annotations

from pathlib import Path

from reprieve.cli import options as o
from reprieve.cli.compare import compare

ARMS = (
    "top_k:k=4",
    "margin:delta=3",
    "typical:slack=1",
    "fuzzy:threshold=0.4",
    "fly",
    "cascade:alpha=0",
    "asd:regret=4,budget=20",
    "math_symbols",
    "random:rate=0.9",
)
QUESTION = "Anna has 23 apples. She buys 18 more apples. She gives away 9 apples. How many apples does Anna have now?"


def command(limit: o.Limit = 100, seed: o.Seed = 0, device: o.Device = None, out: o.Out = Path("runs/demo")) -> int:
    """Compare nine training-free rules with lossless and target-only on generated word problems."""
    _show_answer("lossless", device)
    _show_answer("margin:delta=6", device)
    from reprieve.evaluation.arms import make_arms

    return compare(
        make_arms(ARMS, [16]),
        target=o.BUNDLED,
        draft=None,
        drafter="draft",
        dtype="float32",
        device=device,
        task="arithmetic",
        split="test",
        limit=limit,
        seed=seed,
        sampling=o.sampling_options(0.0, 1.0, 0),
        out=out,
    )


def _show_answer(rule: str, device: str | None) -> None:
    from reprieve.cli import generate

    heading = o.console()
    heading.print(f"\n[bold]{rule}[/bold]  {QUESTION}", soft_wrap=True)
    generate.command(QUESTION, rule=rule, device=device)
    heading.print("plain: the target's token; green: drafted, matched; yellow: drafted, rescued\n", soft_wrap=True)
