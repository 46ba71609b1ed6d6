"""`reprieve sweep`: one rule over thresholds and K."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reprieve.cli import options as o
from reprieve.cli.compare import compare


def command(
    rule: Annotated[str, typer.Option(help="The rule, such as fuzzy:divergence=js.")],
    thresholds: Annotated[str, typer.Option(help="Values of the rule's own parameter, such as 0.1,0.2,0.4.")],
    dial: Annotated[str | None, typer.Option(help="Which parameter to vary. Default: the rule's dial.")] = None,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[str, typer.Option(help="K, or several: 8,16.")] = "16",
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
    out: o.Out = Path("runs/sweep"),
) -> int:
    """Draw a rule's frontier: its parameter at every value, at every K."""
    from reprieve.evaluation.arms import make_arms, sweep_rules

    rules = sweep_rules(rule, o.parse_numbers(thresholds, "--thresholds"), dial=dial)
    return compare(
        make_arms(rules, o.parse_numbers(num_draft_tokens, "--num-draft-tokens", int)),
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
