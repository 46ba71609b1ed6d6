"""`reprieve certify`: the most lenient threshold with a proved price."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reprieve.cli import options as o


def command(
    rule: Annotated[str, typer.Option(help="The rule, such as judge:path=heads/j or margin.")],
    max_drop: Annotated[float, typer.Option(help="The loss to stay below: 0.01 is one point.")],
    confidence: Annotated[float, typer.Option(help="Of the promise.")] = 0.95,
    loss: Annotated[
        str, typer.Option(help="net_drop, or regression: solved strictly and failed relaxed.")
    ] = "net_drop",
    thresholds: Annotated[str | None, typer.Option(help="Values of the rule's dial to try.")] = None,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[int, typer.Option(help="K: drafted tokens a round.")] = 16,
    task: o.TaskName = "arithmetic",
    split: Annotated[str, typer.Option(help="Split to calibrate on.")] = "validation",
    limit: o.Limit = 1000,
    offset: o.Offset = 0,
    held_out_split: Annotated[
        str, typer.Option(help="Split to confirm on; the same one goes on after --limit.")
    ] = "test",
    held_out_limit: Annotated[int, typer.Option(help="Number of held-out problems.")] = 1000,
    trials: o.Trials = 1,
    workers: Annotated[int, typer.Option(help="Processes side by side.")] = 1,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    draft_temperature: o.DraftTemperature = None,
    chat_template: o.ChatTemplate = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: o.Out = Path("runs/certify"),
) -> int:
    """Certify a threshold: walk from strict to lenient, stop at the first that cannot be proved, confirm held out."""
    from reprieve.calibration.certify import Promise

    promise = Promise(max_drop, confidence, loss)
    values = o.parse_numbers(thresholds, "--thresholds") if thresholds else []
    sampling = o.sampling_options(temperature, top_p, top_k, draft_temperature)
    from reprieve.evaluation.certifying import Plan, certify
    from reprieve.heads.loading import attach_heads
    from reprieve.rules import parse_rule

    shared = dict(
        drafter=drafter, task=task, num_trials=trials, seed=seed, sampling=sampling, chat_template=chat_template
    )
    plan = Plan(
        rule=attach_heads(parse_rule(rule)),
        promise=promise,
        thresholds=values,
        num_draft_tokens=num_draft_tokens,
        calibration={**shared, "split": split, "limit": limit, "offset": offset},
        held_out={
            **shared,
            "split": held_out_split,
            "limit": held_out_limit,
            "offset": offset + limit if held_out_split == split else 0,
        },
    )
    plan.candidates()
    pair, loaded = o.load_pair_and_task(target, draft, dtype, device, task)
    show = o.console().print
    with o.progress_bar("answers") as bar:
        outcome = certify(
            plan,
            pair,
            loaded,
            out,
            command=o.command_line(),
            num_workers=workers,
            announce=lambda line: show(line, soft_wrap=True, markup=False),
            progress=o.reporter(bar),
        )
    if outcome is None:
        o.console(stderr=True).print("interrupted: answers are kept; run again to go on")
        return 130
    if outcome.certificate is None:
        show(f"no certificate: {outcome.reason}", soft_wrap=True, markup=False)
        return 1
    show(f"\n{outcome.certificate.statement}", soft_wrap=True, markup=False)
    show(f"{outcome.certificate.verdict}; certificate: {outcome.path}", soft_wrap=True, markup=False)
    show(f"use it: reprieve bench --arm certified:{outcome.path}", soft_wrap=True, markup=False)
    return 0
