"""`reprieve audit arbitration`: whether an arbiter takes the branch that ends better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from reprieve.cli import options as o
from reprieve.errors import SpecError


def command(
    arbiter: Annotated[str, typer.Option(help="Folder or hub id. Default: the bundled pair's.")] = (
        "reprieve/arithmetic-arbiter"
    ),
    threshold: Annotated[float | None, typer.Option("--lambda", help="Default: the arbiter's own.")] = None,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="K; the arbiter's own when left out.")] = None,
    task: o.TaskName = "arithmetic",
    split: Annotated[str | None, typer.Option(help="Split; test if there is one.")] = None,
    temperature: Annotated[float, typer.Option(help="Of the answers; their branches go on greedily.")] = 0.0,
    draft_temperature: o.DraftTemperature = None,
    seed: o.Seed = 0,
    limit: o.Limit = 100,
    offset: o.Offset = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path | None, typer.Option(help="File for the numbers, as JSON.")] = None,
) -> int:
    """Decode both branches of every mismatch that an arbiter reaches (CoSpec, Table 3)."""
    from reprieve.engine import SamplingParams
    from reprieve.evaluation.arbitration import diagnose
    from reprieve.evaluation.arms import Arm, build_decoder
    from reprieve.evaluation.runner import environment
    from reprieve.files import replace_file
    from reprieve.heads.loading import attach_heads
    from reprieve.rules import ArbiterRule

    o.require_problems(limit, offset)
    o.require_file(out)
    rule = attach_heads(ArbiterRule(path=arbiter, lambda_=threshold))
    assert isinstance(rule, ArbiterRule)
    pair, loaded = o.load_pair_and_task(target, draft, dtype, device, task)
    if not loaded.graded:
        raise SpecError(f"task {task} has no right answers: branches cannot be compared on it")
    split = o.split_of(loaded, split, "test")
    k = rule.head.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    decoder = build_decoder(Arm(rule.spec, rule, k), pair, task=task)
    params = SamplingParams(
        max_new_tokens=loaded.max_new_tokens,
        stop=tuple(loaded.stop),
        temperature=temperature,
        draft_temperature=draft_temperature,
        seed=seed,
    )
    problems = loaded.problems(split, limit, offset=offset)
    with o.progress_bar("problems") as bar:
        found = diagnose(decoder, pair, loaded, problems, params, progress=o.reporter(bar, "problems")).summary()
    settings = {
        "command": o.command_line(),
        **environment(),
        "rule": rule.spec,
        "arbiter": rule.head.fingerprint,
        "target": target,
        "draft": draft,
        "num_draft_tokens": k,
        "task": task,
        "split": split,
        "limit": limit,
        "offset": offset,
        "temperature": temperature,
        "draft_temperature": draft_temperature,
        "seed": seed,
    }
    if out is not None:
        replace_file(out, json.dumps({**settings, "diagnosis": found}, indent=2) + "\n")
    o.console().print(_table(found, rule.spec))
    return 0


def _table(found: dict[str, Any], spec: str) -> Table:
    from reprieve.evaluation.arbitration import CATEGORIES

    table = Table(
        title=f"{spec}: {found['num_mismatches']} reached mismatches of {found['num_problems']} problems; brackets are "
        "95% bootstrap intervals over problems",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("category", "n", "share, %", "draft not worse, %", "draft chosen, %", "agreement, %"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for category in CATEGORIES:
        values = found[category]
        shares = (_share(values[name]) for name in ("share", "draft_not_worse", "draft_chosen", "agreement"))
        table.add_row(category.replace("_", " "), str(values["num"]), *shares)
    return table


def _share(values: list[float] | None) -> str:
    if values is None:
        return "-"
    share, low, high = (100 * value for value in values)
    return f"{share:.1f} [{low:.1f}, {high:.1f}]"
